"""The runtime patch set against SGLang, as data: which functions are hooked and what they must look like."""
