"""The laws of methods that talk, for a method of your own: ``testing.check(method)``.

A test of yours is one line, ``assert not testing.check(method).failed``. ``method`` is
a function of the inner optimizer; ``check`` says what else it may be and what may be
declared. Four workers each pull at the same small model from their own side, for two
rounds of steps, and what happens is read by many laws:

===================== ==================================================================
law of every method   what it says
===================== ==================================================================
runs                  virtual workers take its steps with a traced ``step``, and talk
compiles once         one program serves all steps of a kind, traced once; traced again
                      it is the same program; ``fit`` goes the same way
types constant        structure, shapes and types stay what ``init`` made them, for
                      float32 and bfloat16, at a silent step, a sync and a traced step
resume                from copies of the carry the run goes on bit for bit
zero gradients        where each worker sits at its own optimum, nothing moves
backends agree        virtual workers, ``shard_map`` and ``pmap`` compute the same, with
                      and without JAX's variance check
scan                  ``lax.scan`` of the steps, inside or outside, is the loop
donation              parameters and state may be donated; ``init`` copies
half precision        bfloat16 parameters stay so, and finite, and learn
any number of workers 1, 3, 5 and 8 workers improve the model; one of them sends nothing
copies                workers with the same data do what one of them would do
inner sees all        parameters and extra arguments reach the inner optimizer
composes              a rate may be injected; a partition and a mask may enclose it
learns                workers that disagree approach the optimum of their mean
fresh draws           random numbers, if any, are drawn anew at every step
===================== ==================================================================

================================= ======================================================
property, which some may lack     what it says
================================= ======================================================
one worker is the inner optimizer nothing else acts on a worker that is alone
relabelling permutes              other names of the workers only permute the results
workers agree                     after a sync all workers hold the same model
changes size                      it goes on with more workers or fewer, and keeps what
                                  was agreed on and the means of the rest
================================= ======================================================

A property that is missing is reported and is no failure, unless ``claims=`` says that
the method has it. Equality is asked bit for bit first. Where two programs round
otherwise, their parameters are compared to rounding, for as long as one rounding more
or less at the start stays one: behind a flipped sign nothing can be said.

Of a ``Compressor``: shapes, zero, fixed payload, shared key, repeats, linear, backends
agree; the properties contracts, unbiased (either with its constant where ``law``
declares it, which is then a claim), shows NaN. Of a ``Trigger``: runs, same everywhere,
backends agree, types constant, repeats, a known step, clock; the property NaN fires.
"""

from .checks import Report as Report, Verdict as Verdict, check as check
