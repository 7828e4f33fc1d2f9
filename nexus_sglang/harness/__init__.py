"""A real SGLang server to talk to: what the demo, ``nexus-sglang eval``, the benchmarks and the tests share.

* ``server``: starts SGLang as a child process, waits for it, and stops all of it.
* ``client``: greedy requests, and what their answers say about the cache.
* ``models``: small models made once from a package, in a checked cache.
* ``smollm2``: the recipe of the one model there is.

Nothing here imports SGLang: it is a command that is run, and a service that is asked.
"""
