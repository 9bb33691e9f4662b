"""Adapters for training frameworks: they translate, nothing else. Import the one you use."""
