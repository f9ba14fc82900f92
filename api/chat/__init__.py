"""Conversations to prompts, and answers to reasoning, text and calls of tools: templates, forms, enforcement."""
