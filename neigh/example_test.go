package neigh_test

import (
	"fmt"
	"net/netip"
	"time"

	"ipoibcm/ib"
	"ipoibcm/neigh"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
)

// A packet waits for the address of its next hop: the table asks, the answer comes,
// the packet goes.
func Example() {
	now := time.Unix(1000, 0)
	a := encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x123, GID: port("fe80::1")}
	b := encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x456, GID: port("fe80::2")}
	ipA, ipB := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	table := neigh.New(neigh.Options{LinkAddr: a, DADProbes: -1})
	table.Step(nil, now, neigh.AddrAdded{Prefix: netip.PrefixFrom(ipA, 24)})
	for _, act := range table.Step(nil, now, neigh.Resolve{IP: ipB, Packet: []byte("a packet")}) {
		if send, ok := act.(neigh.SendUD); ok {
			var request arp.Packet
			_ = request.UnmarshalBinary(send.Payload)
			fmt.Println("to everybody:", send.To.Broadcast, request.Op, "for", request.TargetIP)
		}
	}
	reply, _ := arp.NewRequest(a, ipA, ipB).ReplyFrom(b).AppendBinary(nil)
	for _, act := range table.Step(nil, now.Add(time.Millisecond), neigh.RecvARP{From: b.Key(), Payload: reply}) {
		switch act := act.(type) {
		case neigh.Resolved:
			fmt.Println(act.IP, "is at", act.LinkAddr)
		case neigh.Deliver:
			fmt.Printf("%q may go\n", act.Packet)
		}
	}
	// Output:
	// to everybody: true request for 10.0.0.2
	// 10.0.0.2 is at 80 000456 fe80::2
	// "a packet" may go
}

func port(s string) ib.GID {
	g, _ := ib.ParseGID(s)
	return g
}
