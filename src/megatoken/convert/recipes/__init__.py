"""Translate recipes of nanoGPT, llm.c and Composer."""
