"""SnapKV, TOVA and StreamingLLM here and in kvpress, on the same prompts."""
