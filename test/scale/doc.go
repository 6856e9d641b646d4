// Package scale measures and bounds what one interface costs among very many
// neighbours: octets, time, allocations, set-ups. One real machine stands among
// up to 100,000 peers that keep no state, in virtual time.
//
// What is asserted is what other work on the processor cannot change: octets in the
// heap, allocations, how often each block of the machine is run, and with a median and
// several tries the ratio of two times. docs/scale.md has the figures.
package scale
