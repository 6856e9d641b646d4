// Package scale measures and bounds what one interface costs among very many
// neighbours: octets, time, allocations, set-ups. One real machine stands among
// up to 100,000 peers that keep no state, in virtual time.
//
// The tests assert only what other work on the processor cannot change: octets in the
// heap, allocations, how often each block of the machine's code is run, and the ratio of
// two times, for which they take medians and try several times. docs/scale.md has the
// figures.
package scale
