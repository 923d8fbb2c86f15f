"""What a tier's author and a store's tester need, shipped with the package.

contract   the laws of core.tier.Tier as a test class to subclass (needs pytest and Hypothesis)
store_contract   the laws of a store, embedded or a daemon's, the same way
daemons    daemons in processes of their own, to be stopped, killed and started again
twins      a memory tier; faulty, slow and counting wrappers around any tier
emulation  drives that the machine does not have: for tests, and as a plug-in tier
faults     errors, torn writes, stalls and kills between a drive and its disk
images     keys, payloads, record images and loads
clocks     a clock that moves when told to
"""
