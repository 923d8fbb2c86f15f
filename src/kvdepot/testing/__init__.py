"""What the author of a volume and the tester of a store need, shipped with the package.

contract   the laws of core.volume.Volume as a test class to subclass (needs pytest and Hypothesis)
store_contract   the laws of a store, embedded or a daemon's, the same way
daemons    daemons in processes of their own, to be stopped, killed and started again
fakes      a volume in memory; faulty, slow and counting wrappers around any volume
emulation  drives that the machine does not have: for tests, and as a plug-in volume
faults     errors, torn writes, stalls and kills between a drive and its disk
images     keys, payloads, record images and reads
clocks     a clock that moves when told to
"""
