"""The lab behind policies and kvpress: a Hugging Face model whose cache is cut by the server's own code."""
