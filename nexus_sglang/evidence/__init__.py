"""What is measured about the blocks of a sequence, from the last queries that were asked. Knows slots and policies."""
