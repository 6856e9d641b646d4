// Package datapath is the hot loop: it moves packets from the TUN to queue pairs and back.
//
// A [Loop] reads batches from the TUN, looks each packet up in a cache of destinations, writes the
// 4-octet header into head-room and posts the packet. It checks messages that come in and writes
// them to the TUN. What needs a decision goes up to the control plane on a bounded ring of
// [Frame]s: misses, packets too big for their path, ARP, ND, IGMP, MLD, CM and path probes. The
// loop decides nothing about next hops, neighbours, connections or MTUs.
//
// The cache ([Loop.SetDest]) knows exact matches only: it holds answers of the kernel, whose routes
// are not copied here. An answer stays in use until the owner of the cache replaces or deletes it.
// When an answer is old, the next packet that takes it makes the loop send a TXStale frame up. The
// owner bounds the size of the cache.
//
// Nothing is allocated per packet, every queue is bounded, and every drop has a counter with a
// reason ([Counters]). Sources: RFC 4755 sections 2.1 and 4, RFC 4391 section 6,
// docs/adr/0041-data-threads.md.
package datapath
