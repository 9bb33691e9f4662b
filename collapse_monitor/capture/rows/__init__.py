"""The distribution an attention call really used, on sampled query rows."""
