// Package explore drives real ipoib.Interface machines, each with the cm that
// it contains, through every interleaving of what can happen while connections
// are set up.
//
// A world is two or three machines and the messages in flight between them. From
// every state the search tries each possible next event: a host gets its first
// packet for another; any message in flight arrives; a message is lost, arrives
// twice, or stays in flight past a timer, as often as the bounds allow; the next
// timer expires; a host restarts without a goodbye. States are compared by a
// canonical print of everything the machines hold (communication IDs, QPNs and
// PSNs numbered as they are met, times relative to now). So no state is searched
// twice, and the search ends by itself when all states within the bounds are
// known.
//
// In every state it holds that
//
//   - one pair never has two RFC 4755 connections up once the exchange is quiet;
//   - both ends agree on connection, QPNs, PSNs, path MTU and MTU;
//   - no queue pair and no communication ID is left over;
//   - without a restart no attempt fails while fewer messages are lost than are
//     sent again; if none is lost or delayed, no timer is needed;
//   - a host rejects a REQ with 28 only in favour of an outstanding REQ of its own,
//     which the other host has not rejected in favour of the first one;
//   - an RFC peer is never sent a REQ with the 0x10 service ID;
//   - once nothing is lost any more, what hosts send each other arrives, on one
//     connection per pair, within the longest time that the rules allow.
//
// In some worlds all CM messages travel in-band. In others those of one host do,
// and those of the other host travel over QP 1.
//
// The search simplifies: a message arrives at once unless it is delayed, and a
// delayed one within maxDelay; UD frames (ARP) are never lost, except the
// announcements of a restarted host; of each random pause one length is tried per
// world; rate limits and idle times are off.
//
// A second search (TestSubnets) has two such machines at ports of a simulated InfiniBand subnet
// (internal/simsm). The subnet manager goes away, or starts anew and asks the hosts to register
// again or does not; it answers late or not at all; P_Keys move, LIDs change, links fail, and a group
// is joined, left and sent to. A path keeps the order of MADs, as InfiniBand's do; all else happens in
// every order. The hosts have UD only, and at most two questions in flight.
//
// TestLies uses the worlds of the first search. It brings a machine into every state for which a lie
// could be meant, and sends it that lie.
//
// TestBroken breaks the code on purpose and shows that the search notices. A failure prints, in words,
// the shortest sequence of events that leads to it. make test explores to bounds that take a minute or
// two, make explore to larger ones; one world by itself:
//
//	go test ./test/explore -run TestExplore -v -timeout 0 -explore.large -explore.only 'restart of one'
package explore
