"""KV slots under virtual ids: page table, compact rows, block ledger, capacity arithmetic. Knows no policies."""
