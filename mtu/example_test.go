package mtu_test

import (
	"fmt"
	"net/netip"

	"ipoibcm/mtu"
)

// Both ends take the smaller Receive MTU, less the 4-octet header.
func ExampleNegotiate() {
	fmt.Println(mtu.Negotiate(65524, 9000, true))
	_, err := mtu.Negotiate(65524, 1024, true)
	fmt.Println(err)
	// Output:
	// 8996 <nil>
	// Receive MTU 1024 against our 65524 gives an IP MTU of 1020, below 1280
}

// While a connection is set up, packets that fit go by UD and larger ones wait.
func ExampleDecide() {
	hop := mtu.NextHop{MTU: 2044, Pending: 65520}
	to := netip.MustParseAddr("10.0.0.2")
	fmt.Println(mtu.Decide(mtu.Packet{Len: 1500, Dst: to, DF: true}, hop).Verdict)
	fmt.Println(mtu.Decide(mtu.Packet{Len: 9000, Dst: to, DF: true}, hop).Verdict)

	hop = mtu.NextHop{MTU: 2044} // no connection
	d := mtu.Decide(mtu.Packet{Len: 9000, Dst: to, DF: true}, hop)
	fmt.Println(d.Verdict, d.MTU)
	// Output:
	// send
	// wait
	// too big 2044
}
