"""``nexus-sglang eval``: what eviction does to answers, asked through a real SGLang server.

Modules, in the order in which a run uses them:

* ``command``: the command line, and what a run checks before hours of work.
* ``servers``: where the jobs are played: one server per policy that is started, or a running one.
* ``plan``: what to measure, the jobs this makes, and the result file that a later run goes on with.
* ``prose``: filler sentences and the draws behind all generated text.
* ``recall``: short recall tasks, a few facts hidden in filler.
* ``documents``: one document with the material of thirteen RULER families, and its questions.
* ``conversations``: multi-turn tasks, each turn read from what the turns before it left.
* ``fidelity``: KL divergence, top-1 agreement and perplexity against the full cache.
* ``user_data``: a user's own chats with the strings their answers must contain.
* ``runner``: plays jobs against one server.
* ``scoring``: string match of an answer, as RULER defines it.
* ``intervals``: standard errors and Student's intervals.
* ``tables``, ``plots``, ``report``: from the result file to the report.
"""
