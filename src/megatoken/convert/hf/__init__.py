"""Load and write Hugging Face model folders."""
