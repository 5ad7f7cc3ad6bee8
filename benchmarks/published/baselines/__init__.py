"""Published placement methods under gdp's judge: research code, no part of the package.

No source of these papers was at hand: each module follows its paper as far as its author recalls
it, and says where it differs. All are written for equal terms: one judge, that counts evaluations;
one seed; features of the same nodes (chains of ops that HSDAG would also join).
"""
