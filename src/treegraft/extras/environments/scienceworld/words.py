"""The words of ScienceWorld, as blanks part them, for a word-level tokenizer.

Seen in 24 worlds of the find and lifespan games with "easy": all rooms, their objects, the results
of gold paths, and the forms of actions; with names of plants, animals and colours from others.
"""

from __future__ import annotations

from typing import Final

_SEEN: Final = """
'outside' (Beowulf) (Beowulf), (Beowulf). (Beowulf, (Frankenstein) (Frankenstein), (Frankenstein).
(Frankenstein, (Moby (Pride (Sherlock (The (containing (or (that 1 10 2 3 4 5 6 7 8 9 A Ambiguous
Arthur Austen Austen) Austen), Austen). Austen, Beowulf Beowulf) Beowulf), Beowulf). Beowulf,
Charles Conan Darwin Darwin) Darwin), Darwin). Darwin, Dick Dick) Dick), Dick). Dick, Doyle Doyle)
Doyle), Doyle). Doyle, First First, Focus Foundations Frankenstein Frankenstein) Frankenstein),
Frankenstein). Frankenstein, Here Herman Holmes Holmes) Holmes), Holmes). Holmes, In Jane Mary
Melville Melville) Melville), Melville). Melville, Moby No OBJ On Origin Prejudice Prejudice)
Prejudice), Prejudice). Prejudice, Pride Shelley Shelley) Shelley), Shelley). Shelley, Sherlock
Species Species) Species), Species). Species, The Then Then, This Wollstonecraft You Your a a(n)
abstract action activate adult agent air already also an and animal animal: animals ant apple
apricot are around art artist at avocado axe baby banana bathroom bathtub battery bear beaver bed
bedroom bee beowulf black blank blast blue boat book bowl box brown bulb butterfly by called
cancel): caterpillar celsius chair chameleon cherry chicken chipmunk chloride chloride) close closed
closet common containing couch counter cow crocodile crossing cup cupboard currently deactivate
deactivated decide degrees desk dick door dove down dragonfly drain drawer drawing dunk eat egg
elephant enter farm find finger fire flower flush focus for foundations foundry fountain
frankenstein freezer fridge frog furnace giant glass go grapefruit green greenhouse ground hallway
hatchling hedgehog height hills hive holmes in input intended inventory is is: it iterations jar jay
jug juvenile kitchen known large larva lemon life light lighter living location longest look low
lush matches mattress meadow mix moby moon moth mountain mouse move non-living nothing nothing)
nothing). number of off on open open) orange origin outside oven paint paint) painting parrot pea
peach pear people pick picture pillow pillow.. pink pit plant playing poet poet) poet), poet). poet,
pot potato potato), pour prejudice pride pupa purple put rabbit read reading red reproducing
request: reset river rolling room see: seed seedling shapes shelf sherlock shortest shovel sink soap
sodium soil soil) span species sprout stage stopwatch stove studio substance switch table tadpole
tall task teleport temperature that the then thermometer thing titled to toad toilet tortoise tree
turned turtle two ultra unknown up use violet wait wait1 water water) which white wintery wire with
wolf wood workshop yellow you your
"""
_ENDS: Final = [
    f"{word}{mark}"
    for word in _SEEN.split()
    if word.isalpha() and word.islower()
    for mark in (".", ",")
]
"""Any object may end a sentence or stand in a list."""

WORDS: Final = (*_SEEN.split(), *_ENDS)
