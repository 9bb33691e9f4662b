"""The tab "Collapse" in TensorBoard. Nothing in here loads torch: it runs in TensorBoard's process."""
