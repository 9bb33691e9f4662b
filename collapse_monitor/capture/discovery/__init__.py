"""Learning from one watched forward what a model is made of: by data flow, never by class names."""
