package cm_test

import (
	"fmt"
	"math/rand/v2"
	"time"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/mad"
)

// A host is a manager and its driver, which carries out what the manager asks.
type host struct {
	name string
	m    *cm.Manager
	peer *host
}

// do tells the manager of ev, and carries out what follows.
func (h *host) do(ev cm.Event) {
	for _, act := range h.m.Step(nil, time.Unix(1000, 0), ev) {
		switch act := act.(type) {
		case cm.SendMAD:
			_, msg, _ := mad.Parse(act.MAD.Data[:])
			fmt.Println(h.name, "sends", msg.Attr())
			received := *act.MAD
			received.Local, received.Remote = act.MAD.Remote, act.MAD.Local
			h.peer.do(cm.RecvMAD{MAD: &received})
		case cm.RequestReceived: // a driver moves a queue pair to RTS first
			h.do(cm.Accept{Handle: act.Handle, QPN: 0xb2})
		case cm.ReplyReceived: // here too
			h.do(cm.Ready{Handle: act.Handle})
		case cm.Established:
			fmt.Printf("%s is connected: QPN %v to %v\n", h.name, act.LocalQPN, act.RemoteQPN)
		}
	}
}

func newHost(name, address string, guid ib.GUID) (*host, ib.GID) {
	port, _ := ib.ParseGID(address)
	return &host{name: name, m: cm.New(cm.Options{GID: port, CAGUID: guid, Rand: rand.NewPCG(uint64(guid), 0)})}, port
}

// Two managers set a connection up.
func Example() {
	a, _ := newHost("a", "fe80::1", 1)
	b, portB := newHost("b", "fe80::2", 2)
	a.peer, b.peer = b, a

	service := serviceid.New(serviceid.RFC, 0x000456)
	b.do(cm.Listen{ServiceID: service})
	a.do(cm.Connect{Handle: 1, Remote: portB, ServiceID: service, QPN: 0xa1, PathMTU: ib.MTU1024})
	// Output:
	// a sends REQ
	// b sends REP
	// a sends RTU
	// b is connected: QPN 0x0000b2 to 0x0000a1
	// a is connected: QPN 0x0000a1 to 0x0000b2
}
