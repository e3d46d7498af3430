"""Callbacks that run a `Monitor` inside of trainers: `huggingface` for Hugging Face, `lightning` for Lightning."""
