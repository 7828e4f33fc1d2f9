"""The quality suite behind ``nexus-sglang eval``: tasks, conversations and fidelity through a real server."""
