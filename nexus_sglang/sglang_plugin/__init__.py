"""The only SGLang-shaped room. What happens to ``--kv-policy nexus``, in order:

1. flag        ``flags``: SGLang loads the plugin before it parses arguments; our flags become a validated
               ``NexusConfig``, carried to the scheduler processes in one environment variable.
2. refusals    ``rejects``: combinations that cannot work are refused while SGLang resolves its arguments.
3. allocator   ``allocator``: the scheduler process hands out *virtual* slot ids from ``memory.PageTable``.
4. row         ``runtime``: an auxiliary cache of SGLang's request pool keeps one compact row per request.
5. forward     ``attention_hooks``: attention reads compact rows; the last queries are kept in a ring.
6. statistics  after the forward pass, block attention is measured for sequences over budget,
7. policy      the policy orders the blocks,
8. table       and the evictor unmaps the losers. Names stay, so the radix tree (``tree``) never notices.

``admission`` prices requests in physical slots, ``self_check`` refuses to serve when a hook is not in place,
``telemetry`` shows the counters. Without ``--kv-policy`` none of steps 2 to 8 is installed.
"""
