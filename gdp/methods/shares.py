"""Shares of the seconds: what each phase may take of a budget of time, in the order of spending.

Each is a share of the seconds left when its phase begins, unless a comment says of all. Nothing is
imported here, so that every package may. Shares of memory and of entries are where they are used.
"""

# An answer (`gdp.question.solve`), of all its seconds. The method has the rest.
BOUND_SHARE = 0.1
"""Kept for the proven lower bound."""
SIMPLIFY_SHARE = 0.05
"""Kept for fewer transfers and pieces."""
DEVIATION_SHARE = 0.05
"""Kept for draws of learned costs."""

# accelerate's plan, which may search twice.
RESIDENT_SHARE = 0.5
"""For a search on the accelerators alone where the model may not fit them."""

# Fine-tuning.
REFERENCE_SHARE = 0.3
"""For reference placements; and of the rest, for `auto`."""

# `auto`: all candidates, repairs, replicas, then the search from the best of them.
CANDIDATE_SHARE = 0.6
"""For all candidates together, before the search from the best of them."""
TIGHT_CANDIDATE_SHARE = 0.3
"""Likewise, of a latency whose memory binds, on a graph that is searched as a whole: repairs and
the program would take all of the other share, and gain less with it than the search."""
REPAIR_SHARE = 0.5
"""For each repair of a candidate, where none fits."""
REPLICA_PROGRAM_SHARE = 0.2
"""Of the rest, for pipelines with replicated stages along linear orders."""
TEAMS_AHEAD_SHARE, TEAMS_BEHIND_SHARE = 0.5, 0.15
"""Then for search of replica groups, where these are ahead of plain heuristics, and elsewhere."""
TEAMS_LOOK_SHARE = 0.2
"""Of that, for the heuristics' placements of one choice of replica groups."""

# A local search.
LOCAL_START_SHARE = 0.3
"""For finding starts where none is given."""
OUTSIDE_SHARE = 0.1
"""For a start outside the memory limits."""

# The policy.
ADVICE_SHARE = 0.6
"""For all heuristics together, at most, as in `auto`."""

# Pipelines.
REPLICATED_SHARE = 0.5
"""For pipelines with replicated stages."""
DOWN_SETS_SHARE = 0.8
"""For the program over down-sets; the rest for linear orders."""

# Fix-and-optimise: chains first, then rounds.
LATENCY_HOT_SHARE = 0.33
"""In the program of the latency, for chains that cross the memory limits."""
PERIOD_SEARCH_SHARE = 0.1
"""In the program of the period, for the search that comes first."""
PERIOD_HOT_SHARE, PERIOD_HOT_MOST_SHARE = 0.6, 0.8
"""Of the rest, for chains that cross the memory limits; and where the program of all devices is too
large."""
FIT_ROUND_SHARE = 0.3
"""For one round."""

# `exact`, of all its seconds up to here.
EXACT_PIPELINE_SHARE = 0.3
"""For a pipeline's program that comes before the portfolio or a solver."""
EXACT_START_SHARE = 0.25
"""For the portfolio before a solver."""
EXACT_BOUND_SHARE = 0.2
"""For bounds that know no placement."""
# Of the seconds left, target by target.
EXACT_VALUE_SHARE = 0.3
"""To decide the value itself."""
EXACT_TARGET_SHARE = 0.4
"""To decide a target below the value."""

# `exact` of the largest load, of all its seconds.
LOAD_PIPELINE_SHARE = 0.1
"""For the pipelines' program."""
LOAD_CP_SHARE = 0.5
"""Of the seconds left then, for CP-SAT."""
LOAD_VALUE_SHARE = 0.1
"""Of the seconds left then, to decide the value itself."""
