"""What is matched, computed again and retracted on a small pool, beside stock SGLang."""
