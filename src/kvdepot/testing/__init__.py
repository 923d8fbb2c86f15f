"""What a tier's author and a store's tester need, shipped with the package.

contract   the laws of core.tier.Tier as a test class to subclass (needs pytest and Hypothesis)
twins      a memory tier; faulty, slow and counting wrappers around any tier
faults     errors, torn writes, stalls and kills between a drive and its disk
images     keys, payloads, record images and loads
clocks     a clock that moves when told to
"""
