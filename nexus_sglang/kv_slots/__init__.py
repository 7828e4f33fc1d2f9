"""Virtual KV slots: page table, compact rows, block ledger, capacity arithmetic. Knows slots, not policies."""
