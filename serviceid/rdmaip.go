package serviceid

// baseRDMAIP is the RDMA IP CM service of IBA annex A11: the octet above the port is the IP
// protocol number, which selects the port space.
const baseRDMAIP ID = 0x00_00_0000_01_00_0000

// protocolTCP is the port space that librdmacm calls RDMA_PS_TCP.
const protocolTCP = 6

// RDMAIP returns the service ID of a TCP port under the RDMA IP CM service (IBA
// annex A11): where a program that uses librdmacm listens.
func RDMAIP(port uint16) ID { return baseRDMAIP | protocolTCP<<16 | ID(port) }
