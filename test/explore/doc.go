// Package explore drives real ipoib.Interface machines, each with the cm that
// it contains, through every interleaving of what can happen while connections
// are set up.
//
// A world is two or three machines and what is in flight between them. From
// every state it goes on with each of: a host gets its first packet for
// another; something in flight arrives, in any order; a message is lost, comes
// twice, or stays in flight past a timer, as often as the bounds say; the next
// timer expires; a host restarts without a goodbye. States are compared by a
// canonical print of everything the machines hold (communication IDs, QPNs and
// PSNs numbered as they are met, times relative to now), so what was seen
// before is not followed twice, and the search ends by itself when all states
// within the bounds are known.
//
// In every state it holds that
//
//   - one pair never has two RFC 4755 connections up once the exchange is quiet;
//   - both ends agree on connection, QPNs, PSNs, path MTU and MTU;
//   - no queue pair and no communication ID is left over;
//   - without a restart no attempt fails while fewer messages are lost than are
//     sent again, and unless one is lost or delayed no timer is needed;
//   - REJ 28 to a REQ is sent only for an outstanding REQ of one's own that stands;
//   - an RFC peer is never asked with the 0x10 service ID;
//   - once nothing is lost any more, what hosts send each other arrives, on one
//     connection per pair, within the longest time that the rules allow.
//
// In some worlds CM messages travel in-band, or those of one host do and those of
// the other go by QP 1.
//
// What it leaves out: a message crosses in no time unless it is delayed, and a
// delayed one arrives within maxDelay; UD frames (ARP) are never lost, but for
// the announcements of a restarted host; of the random pauses one length is
// tried per world; rate limits and idle times are off.
//
// A second search (TestSubnets) has two such machines at ports of a simulated InfiniBand subnet
// (internal/simsm): its manager goes away, starts anew with a word or without, answers late
// or not at all, P_Keys move, LIDs change, links fail, and a group is joined, left and sent to.
// A path keeps the order of MADs, as InfiniBand's do; all else happens in every order. Hosts have
// UD only there, and at most two questions on their way.
//
// The same worlds serve to tell a machine lies in every state it can be in (TestLies).
//
// What is broken on purpose, and how it is noticed, is in TestBroken. A failure
// prints the shortest way there in words. make test explores to bounds that
// take a minute or two, make explore to larger ones; one world by itself:
//
//	go test ./test/explore -run TestExplore -v -timeout 0 -explore.large -explore.only 'restart of one'
package explore
