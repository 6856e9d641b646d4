package explore

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"ipoibcm/cm"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/ipoib"
	"ipoibcm/nexthop"
	"ipoibcm/serviceid"
	"ipoibcm/verbs"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
)

// A scene is host a, told lies while it deals with host b. Whoever tells them is
// at m, or sends from m under the name of b.
type scene struct {
	*world
	a, b, m *node
	heard   []*verbs.MAD // what b said to a, in order
	notes   []string     // what monitor shows of a
}

// The moments at which lies are told.
const (
	atRest    = "at rest"   // a and b know each other, no connection
	dialling  = "dialling"  // the REQ of a is out
	connected = "connected" // by a REQ of a
	accepted  = "accepted"  // by a REQ of b
	closed    = "closed"    // a holds the IDs of it back (TIMEWAIT)
	forgotten = "forgotten" // and does so no more
)

func stage(t *testing.T, moment string, inband bool) *scene {
	s := setup{name: moment, hosts: []host{{qpn: 0x101, gid: 1}, {qpn: 0x102, gid: 2}, {qpn: 0x103, gid: 3}},
		pairs: alone, inband: inband, ipv6: true}
	for i := range s.hosts {
		if inband {
			s.hosts[i].cm = ipoib.CMInband
		}
	}
	w := s.begin(newTools())
	sc := &scene{world: w, a: w.node(0), b: w.node(1), m: w.node(2)}
	w.log = func(format string, args ...any) {
		if line, ok := strings.CutPrefix(fmt.Sprintf(format, args...), "      a: "); ok {
			sc.notes = append(sc.notes, line)
		}
	}
	w.told(0, w.nodes[0].kernel.AddAddr(netip.MustParsePrefix("fd00::1/64")))
	w.pass(10 * time.Second)
	switch moment {
	case atRest:
	case dialling:
		w.send(0, 1, 0)
		w.items = nil
	case accepted:
		w.send(1, 0, 0)
		sc.deliver()
	default:
		w.send(0, 1, 0)
		sc.deliver()
	}
	switch moment {
	case closed, forgotten:
		w.told(1, w.nodes[1].kernel.Up(false))
		sc.deliver()
		if moment == forgotten {
			w.pass(5 * time.Second)
		}
	case connected, accepted:
		w.pass(time.Second)
		if cs := sc.a.f.Conns(); len(cs) != 1 || cs[0].State != "ESTABLISHED" {
			t.Fatalf("%s: %+v", moment, cs)
		}
	}
	return sc
}

// deliver lets everything arrive in order, and notes what a hears.
func (sc *scene) deliver() {
	for len(sc.items) > 0 {
		if it := sc.items[0]; it.kind == itemMAD && it.to == 0 {
			sc.heard = append(sc.heard, it.mad)
		}
		sc.arrive(0, false)
	}
}

// said returns the message of that kind which b sent to a.
func said[M mad.Message](sc *scene) M {
	for _, in := range sc.heard {
		_, msg, _ := mad.Parse(in.Data[:])
		if m, ok := msg.(M); ok {
			return m
		}
	}
	panic("explore: b has not said that")
}

// A teller is where a message comes from, by what its packet says.
type teller struct {
	gid ib.GID
	qpn ib.QPN // of the UD QP; CM messages come from QP 1 if it is zero
}

func (sc *scene) from(n *node) teller { return teller{gid: n.link.GID} }

func (sc *scene) inbandFrom(n *node) teller { return teller{n.link.GID, n.link.QPN} }

// cm makes the event that a MAD is for a.
func (sc *scene) cm(t teller, msg mad.Message) ipoib.Event {
	in := &verbs.MAD{Remote: t.gid, Local: sc.a.link.GID, QPN: ib.QPNGSI, PKey: ib.DefaultPKey}
	b, err := msg.AppendBinary(nil)
	if err != nil {
		panic(err)
	}
	copy(in.Data[:], b)
	if t.qpn == 0 {
		return ipoib.RecvMAD{MAD: in}
	}
	fr, _ := encap.Header{Type: encap.InbandCM}.AppendBinary(nil)
	return ipoib.RecvFrame{SrcGID: t.gid, SrcQPN: t.qpn, DstGID: sc.a.link.GID, Frame: append(fr, in.Data[:]...)}
}

// frame makes the event that a frame on UD is for a.
func (sc *scene) frame(from encap.LinkAddr, typ encap.EtherType, body []byte, err error) ipoib.Event {
	if err != nil {
		panic(err)
	}
	fr, _ := encap.Header{Type: typ}.AppendBinary(nil)
	return ipoib.RecvFrame{SrcGID: from.GID, SrcQPN: from.QPN, DstGID: sc.a.link.GID, Frame: append(fr, body...)}
}

func (sc *scene) arp(from encap.LinkAddr, p arp.Packet) ipoib.Event {
	b, err := p.AppendBinary(nil)
	return sc.frame(from, encap.ARP, b, err)
}

// reply is an ARP reply that says where an address is.
func (sc *scene) reply(n *node, link encap.LinkAddr) arp.Packet {
	return arp.Packet{Op: arp.Reply, Sender: link, SenderIP: addr(n.index), Target: sc.a.f.Link(),
		TargetIP: addr(sc.a.index)}
}

// req makes a REQ of n to a to which nothing is wrong.
func (sc *scene) req(n *node) mad.REQ {
	req := mad.REQ{LocalCommID: 0x77, ServiceID: serviceid.New(serviceid.RFC, sc.a.link.QPN), LocalCAGUID: 9,
		LocalQPN: connQPN | 0x5555, Transport: ib.RC, PathMTU: ib.MTU1024, PKey: ib.DefaultPKey, MaxCMRetries: 7,
		LocalCMResponseTimeout: 16, RemoteCMResponseTimeout: 16}
	req.Primary.LocalGID, req.Primary.RemoteGID, req.Primary.LocalACKTimeout = n.link.GID, sc.a.link.GID, 14
	pd, _ := encap.PrivateData{QPN: n.link.QPN, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(req.PrivateData[:], pd)
	return req
}

// mine is the connection that a has.
func (sc *scene) mine() ipoib.ConnInfo { return sc.a.f.Conns()[0] }

// again tells a message of b once more, as it was or changed.
func again[M mad.Message](from func(*scene) teller, change func(sc *scene, m *M)) func(*scene) ipoib.Event {
	return func(sc *scene) ipoib.Event {
		m := said[M](sc)
		if change != nil {
			change(sc, &m)
		}
		return sc.cm(from(sc), m)
	}
}

func asB(sc *scene) teller       { return sc.from(sc.b) }
func asM(sc *scene) teller       { return sc.from(sc.m) }
func inbandAsB(sc *scene) teller { return sc.inbandFrom(sc.b) }
func inbandAsM(sc *scene) teller { return sc.inbandFrom(sc.m) }

// inbandAsOther is another UD QP at b's port.
func inbandAsOther(sc *scene) teller { return teller{sc.b.link.GID, 0x199} }

// lieREQ tells a REQ of one of the hosts, changed.
func lieREQ(from func(*scene) teller, of int, change func(sc *scene, req *mad.REQ)) func(*scene) ipoib.Event {
	return func(sc *scene) ipoib.Event {
		req := sc.req(sc.nodes[of])
		change(sc, &req)
		return sc.cm(from(sc), req)
	}
}

// snapshot prints a machine with every number as it is.
func (sc *scene) snapshot(n *node) []byte {
	p := printer{raw: true, now: sc.now, writers: sc.t.writers, seen: map[unsafe.Pointer]int{}}
	p.writers.of(reflect.TypeFor[ipoib.Interface]())(&p, unsafe.Pointer(n.f))
	return p.b
}

func (n *node) counts() map[string]uint64 {
	m := map[string]uint64{}
	for _, c := range n.f.Counters() {
		m[c.Name] = c.Value
	}
	return m
}

// risen names the counters that have grown.
func risen(before, after map[string]uint64) string {
	var names []string
	for _, k := range slices.Sorted(maps.Keys(after)) {
		switch d := after[k] - before[k]; d {
		case 0:
		case 1:
			names = append(names, k)
		default:
			names = append(names, fmt.Sprintf("%s+%d", k, d))
		}
	}
	return strings.Join(names, " ")
}

// answers lists the MADs of a that are on their way.
func (sc *scene) answers() string {
	var out []string
	for _, it := range sc.items {
		if it.kind != itemMAD || it.from != 0 {
			continue
		}
		s := it.msg.Attr().String()
		if rej, ok := it.msg.(mad.REJ); ok {
			s += fmt.Sprintf(" %d", rej.Reason)
		}
		if it.mad.QPN != ib.QPNGSI {
			s += " in-band"
		}
		out = append(out, s+" to "+string("abm"[it.to]))
	}
	return strings.Join(out, ", ")
}

// lies are the cases of TestLies.
var lies = []struct {
	name string
	when string
	tell func(*scene) ipoib.Event
	// What rises by one, what is sent, and what a note has to contain.
	counts, answers, why string
}{
	// 4755-8-1
	// REQs that lie about who and where. Reason 12 (IBA volume 1 section 12.6) is for a GID.
	{"REQ in b's name", atRest, lieREQ(asM, 1, func(*scene, *mad.REQ) {}),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a source GID that is not the sender's"},
	{"REQ in b's name", connected, lieREQ(asM, 1, func(*scene, *mad.REQ) {}),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a source GID that is not the sender's"},
	{"REQ in b's name", dialling, lieREQ(asM, 1, func(*scene, *mad.REQ) {}),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a source GID that is not the sender's"},
	{"REQ to b's GID", atRest, lieREQ(asM, 2, func(sc *scene, req *mad.REQ) { req.Primary.RemoteGID = sc.b.link.GID }),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a GID that it was not sent to"},
	{"REQ in b's name to b's GID", atRest, lieREQ(asM, 1, func(sc *scene, req *mad.REQ) {
		req.Primary.RemoteGID = sc.b.link.GID
	}),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a source GID that is not the sender's"},
	{"REQ in a's own name", atRest, lieREQ(asM, 0, func(*scene, *mad.REQ) {}),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a source GID that is not the sender's"},
	{"REQ in-band in b's name", atRest, lieREQ(inbandAsM, 1, func(*scene, *mad.REQ) {}),
		"drop_inband_source inband_received", "", "the REQ is from fe80::2, the packet from fe80::3"},
	{"REQ in-band in b's name", connected, lieREQ(inbandAsM, 1, func(*scene, *mad.REQ) {}),
		"drop_inband_source inband_received", "", "the REQ is from fe80::2, the packet from fe80::3"},
	{"REQ in-band with b's UD QPN", atRest, lieREQ(inbandAsM, 2, func(sc *scene, req *mad.REQ) {
		req.PrivateData[3] = byte(sc.b.link.QPN)
	}),
		"drop_inband_source inband_received", "", "names UD QPN 0x000102, the packet comes from 0x000103"},
	{"REQ in-band to b's GID", atRest, lieREQ(inbandAsM, 2, func(sc *scene, req *mad.REQ) {
		req.Primary.RemoteGID = sc.b.link.GID
	}),
		"cm_rx_req cm_tx_rej inband_received inband_sent", "REJ 12 in-band to m", "names a GID that it was not sent to"},
	// Wrong QPNs and false flags in a REQ.
	{"REQ for another UD QPN", atRest, lieREQ(asM, 2, func(sc *scene, req *mad.REQ) {
		req.ServiceID = serviceid.New(serviceid.RFC, 0x999)
	}),
		"cm_rx_req cm_tx_rej", "REJ 8 to m", "nobody listens"},
	{"REQ with QPN 1", atRest, lieREQ(asM, 2, func(sc *scene, req *mad.REQ) { req.LocalQPN = ib.QPNGSI }),
		"cm_rx_req cm_tx_rej", "REJ 5 to m", "no QPN that a connection can have"},
	{"REQ with the multicast QPN", atRest,
		lieREQ(asM, 2, func(sc *scene, req *mad.REQ) { req.LocalQPN = ib.QPNMulticast }),
		"cm_rx_req cm_tx_rej", "REJ 5 to m", "no QPN that a connection can have"},
	{"REQ as b with the IDs of the connection and another QPN", accepted, func(sc *scene) ipoib.Event {
		req := said[mad.REQ](sc)
		req.LocalQPN++
		return sc.cm(asB(sc), req)
	}, "cm_rx_req cm_tx_rej", "REJ 30 to b", "that of another connection"},
	{"the REQ of the connection, again", accepted, again[mad.REQ](asB, nil),
		"cm_drop_state cm_rx_req", "", "dropped: state"},
	{"the REQ of the connection, from m", accepted, again[mad.REQ](asM, nil),
		"cm_rx_req cm_tx_rej", "REJ 12 to m", "names a source GID that is not the sender's"},
	{"the REQ of the connection, in-band from m", accepted, again[mad.REQ](inbandAsM, nil),
		"drop_inband_source inband_received", "", "the packet from fe80::3"},

	// REPs.
	{"the REP, again", connected, again[mad.REP](asB, nil), "cm_dup_rep cm_retry_rtu cm_rx_rep cm_tx_rtu",
		"RTU to b", "REP again"},
	{"the REP, from m", connected, again[mad.REP](asM, nil), "cm_drop_source cm_rx_rep", "", "dropped: source"},
	{"the REP, in-band from m", connected, again[mad.REP](inbandAsM, nil),
		"cm_drop_source cm_rx_rep inband_received", "", "dropped: source"},
	{"the REP, in-band from another QP of b", connected, again[mad.REP](inbandAsOther, nil),
		"cm_drop_source cm_rx_rep inband_received", "", "dropped: source"},
	{"the REP as b with another communication ID", connected, again(asB, func(_ *scene, m *mad.REP) { m.LocalCommID++ }),
		"cm_drop_unknown_conn cm_rx_rep", "", "another REP came first"},
	{"the REP with other numbers behind the same IDs", connected, again(asB, func(_ *scene, m *mad.REP) {
		m.LocalQPN++
		m.StartingPSN += 99
	}),
		"cm_dup_rep cm_retry_rtu cm_rx_rep cm_tx_rtu", "RTU to b", "REP again"},
	{"a REP to nothing", connected, again(asB, func(_ *scene, m *mad.REP) { m.RemoteCommID++ }),
		"cm_drop_unknown_conn cm_rx_rep", "", "no REQ of ours"},
	{"a REP to the peer's own REQ", accepted, func(sc *scene) ipoib.Event {
		return sc.cm(asB(sc), mad.REP{LocalCommID: mad.CommID(sc.mine().RemoteComm),
			RemoteCommID: mad.CommID(sc.mine().LocalComm), LocalQPN: 0x700})
	}, "cm_drop_unknown_conn cm_rx_rep", "", "no REQ of ours"},
	{"a REP from m", dialling, func(sc *scene) ipoib.Event {
		return sc.cm(asM(sc), mad.REP{LocalCommID: 5, RemoteCommID: mad.CommID(sc.mine().LocalComm), LocalQPN: 0x700})
	}, "cm_drop_source cm_rx_rep", "", "dropped: source"},
	{"a REP in-band from m", dialling, func(sc *scene) ipoib.Event {
		return sc.cm(inbandAsM(sc), mad.REP{LocalCommID: 5, RemoteCommID: mad.CommID(sc.mine().LocalComm), LocalQPN: 0x700})
	}, "cm_drop_source cm_rx_rep inband_received", "", "dropped: source"},
	{"a REP with QPN 1", dialling, func(sc *scene) ipoib.Event {
		return sc.cm(asB(sc), mad.REP{LocalCommID: 5, RemoteCommID: mad.CommID(sc.mine().LocalComm), LocalQPN: ib.QPNGSI})
	}, "cm_drop_malformed cm_rx_rep", "", "no QPN"},
	{"the REP, again", closed, again[mad.REP](asB, nil), "cm_drop_state cm_rx_rep", "", "has ended"},
	{"the REP, again", forgotten, again[mad.REP](asB, nil), "cm_drop_unknown_conn cm_rx_rep", "", "unknown_conn"},

	// RTUs, MRAs, DREQs, DREPs, REJs, LAPs.
	{"the RTU, again", accepted, again[mad.RTU](asB, nil), "cm_dup_rtu cm_rx_rtu", "", "RTU again"},
	{"the RTU, from m", accepted, again[mad.RTU](asM, nil), "cm_drop_source cm_rx_rtu", "", "dropped: source"},
	{"the RTU, in-band from m", accepted, again[mad.RTU](inbandAsM, nil),
		"cm_drop_source cm_rx_rtu inband_received", "", "dropped: source"},
	{"the RTU with another ID", accepted, again(asB, func(_ *scene, m *mad.RTU) { m.LocalCommID++ }),
		"cm_drop_unknown_conn cm_rx_rtu", "", "unknown_conn"},
	{"an RTU to our own REQ", connected, func(sc *scene) ipoib.Event {
		return sc.cm(asB(sc), mad.RTU{LocalCommID: mad.CommID(sc.mine().RemoteComm),
			RemoteCommID: mad.CommID(sc.mine().LocalComm)})
	}, "cm_drop_unknown_conn cm_rx_rtu", "", "unknown_conn"},
	{"an MRA after the fact", connected, func(sc *scene) ipoib.Event {
		return sc.cm(asB(sc), mad.MRA{LocalCommID: mad.CommID(sc.mine().RemoteComm),
			RemoteCommID: mad.CommID(sc.mine().LocalComm), ServiceTimeout: 31})
	}, "cm_drop_state cm_rx_mra", "", "nothing is waiting"},
	{"an MRA from m", dialling, func(sc *scene) ipoib.Event {
		return sc.cm(asM(sc), mad.MRA{RemoteCommID: mad.CommID(sc.mine().LocalComm), ServiceTimeout: 31})
	}, "cm_drop_source cm_rx_mra", "", "dropped: source"},
	{"an MRA for another", dialling, func(sc *scene) ipoib.Event {
		return sc.cm(asB(sc), mad.MRA{RemoteCommID: mad.CommID(sc.mine().LocalComm) + 1, ServiceTimeout: 31})
	}, "cm_drop_unknown_conn cm_rx_mra", "", "unknown_conn"},
	{"a DREQ from m", connected, func(sc *scene) ipoib.Event { return sc.cm(asM(sc), sc.dreq()) },
		"cm_drop_source cm_rx_dreq", "", "dropped: source"},
	{"a DREQ in-band from m", connected, func(sc *scene) ipoib.Event { return sc.cm(inbandAsM(sc), sc.dreq()) },
		"cm_drop_source cm_rx_dreq inband_received", "", "dropped: source"},
	{"a DREQ in-band from another QP of b", connected,
		func(sc *scene) ipoib.Event { return sc.cm(inbandAsOther(sc), sc.dreq()) },
		"cm_drop_source cm_rx_dreq inband_received", "", "dropped: source"},
	{"a DREQ with a wrong QPN", connected, func(sc *scene) ipoib.Event {
		d := sc.dreq()
		d.RemoteQPN++
		return sc.cm(asB(sc), d)
	}, "cm_drop_dreq_qpn cm_rx_dreq", "", "names another QPN"},
	{"a DREQ with a wrong QPN in-band", connected, func(sc *scene) ipoib.Event {
		d := sc.dreq()
		d.RemoteQPN++
		return sc.cm(inbandAsB(sc), d)
	}, "cm_drop_dreq_qpn cm_rx_dreq inband_received", "", "names another QPN"},
	{"a DREQ with a wrong ID", connected, func(sc *scene) ipoib.Event { // whoever has lost its connection is let go
		d := sc.dreq()
		d.LocalCommID++
		return sc.cm(asB(sc), d)
	}, "cm_rx_dreq cm_tx_drep", "DREP to b", "is not known"},
	{"the DREQ, again", closed, again[mad.DREQ](asB, nil), "cm_dup_dreq cm_rx_dreq cm_tx_drep", "DREP to b",
		"DREQ again"},
	{"the DREQ, from m", closed, again[mad.DREQ](asM, nil), "cm_drop_source cm_rx_dreq", "", "dropped: source"},
	{"the DREQ, again", forgotten, again[mad.DREQ](asB, nil), "cm_rx_dreq cm_tx_drep", "DREP to b", "is not known"},
	{"a DREP that nobody asked for", connected, func(sc *scene) ipoib.Event {
		return sc.cm(asB(sc), mad.DREP{LocalCommID: mad.CommID(sc.mine().RemoteComm),
			RemoteCommID: mad.CommID(sc.mine().LocalComm)})
	}, "cm_drop_state cm_rx_drep", "", "dropped: state"},
	{"a DREP from m", connected, func(sc *scene) ipoib.Event {
		return sc.cm(asM(sc), mad.DREP{LocalCommID: mad.CommID(sc.mine().RemoteComm),
			RemoteCommID: mad.CommID(sc.mine().LocalComm)})
	}, "cm_drop_source cm_rx_drep", "", "dropped: source"},
	{"a REJ from m", dialling, func(sc *scene) ipoib.Event { return sc.cm(asM(sc), sc.rej(cm.ReasonInvalidServiceID)) },
		"cm_drop_source cm_rx_rej", "", "dropped: source"},
	{"a REJ in-band from m", dialling, func(sc *scene) ipoib.Event {
		return sc.cm(inbandAsM(sc), sc.rej(cm.ReasonConsumer))
	},
		"cm_drop_source cm_rx_rej inband_received", "", "dropped: source"},
	{"a REJ for another", dialling, func(sc *scene) ipoib.Event {
		rej := sc.rej(cm.ReasonConsumer)
		rej.RemoteCommID++
		return sc.cm(asB(sc), rej)
	}, "cm_drop_unknown_conn cm_rx_rej", "", "unknown_conn"},
	{"a REJ from m", connected, func(sc *scene) ipoib.Event { return sc.cm(asM(sc), sc.rej(cm.ReasonStale)) },
		"cm_drop_source cm_rx_rej", "", "dropped: source"},
	{"a REJ as b with another ID", connected, func(sc *scene) ipoib.Event {
		rej := sc.rej(cm.ReasonStale)
		rej.LocalCommID++
		return sc.cm(asB(sc), rej)
	}, "cm_drop_unknown_conn cm_rx_rej", "", "unknown_conn"},
	{"a REJ 4 from m with b's GUID", connected, func(sc *scene) ipoib.Event {
		rej := sc.rej(cm.ReasonTimeout)
		rej.RemoteCommID = 0
		rej.ARILength = 8
		rep := said[mad.REP](sc)
		for i := range 8 {
			rej.ARI[i] = byte(rep.LocalCAGUID >> (56 - 8*i))
		}
		return sc.cm(asM(sc), rej)
	}, "cm_drop_unknown_conn cm_rx_rej", "", "unknown_conn"},
	{"a REJ 4 as b with its GUID and one communication ID", connected, func(sc *scene) ipoib.Event {
		rep := said[mad.REP](sc)
		rej := mad.REJ{LocalCommID: rep.LocalCommID, MessageRejected: mad.KindOther, Reason: cm.ReasonTimeout, ARILength: 8}
		binary.BigEndian.PutUint64(rej.ARI[:], uint64(rep.LocalCAGUID))
		return sc.cm(asB(sc), rej)
	}, "cm_drop_unknown_conn cm_rx_rej", "", "unknown_conn"},
	{"a REJ after the end", closed, func(sc *scene) ipoib.Event {
		rep := said[mad.REP](sc)
		return sc.cm(asB(sc), mad.REJ{LocalCommID: rep.LocalCommID, RemoteCommID: rep.RemoteCommID,
			Reason: cm.ReasonConsumer, MessageRejected: mad.KindOther})
	}, "cm_drop_state cm_rx_rej", "", "dropped: state"},
	{"a LAP from m", connected, func(sc *scene) ipoib.Event {
		return sc.cm(asM(sc), mad.LAP{LocalCommID: mad.CommID(sc.mine().RemoteComm),
			RemoteCommID: mad.CommID(sc.mine().LocalComm)})
	}, "cm_drop_source cm_rx_lap", "", "dropped: source"},

	// Address resolution: false flags, wrong QPNs, other people's GIDs.
	{"ARP: b without flags", connected, func(sc *scene) ipoib.Event {
		return sc.arp(sc.m.link, sc.reply(sc.b, encap.LinkAddr{QPN: sc.b.link.QPN, GID: sc.b.link.GID}))
	}, "neigh_drop_spoofed neigh_recv_answers", "", "the packet has another source"},
	{"ARP: b with UC only", atRest, func(sc *scene) ipoib.Event {
		return sc.arp(sc.m.link, sc.reply(sc.b, encap.LinkAddr{Flags: encap.FlagUC, QPN: sc.b.link.QPN, GID: sc.b.link.GID}))
	}, "neigh_drop_spoofed neigh_recv_answers", "", "the packet has another source"},
	{"ARP: b with another QPN", connected, func(sc *scene) ipoib.Event {
		return sc.arp(sc.m.link, sc.reply(sc.b, encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x999, GID: sc.b.link.GID}))
	}, "neigh_drop_spoofed neigh_recv_answers", "", "the packet has another source"},
	{"ARP: b with another QPN, from b's port", connected, func(sc *scene) ipoib.Event {
		return sc.arp(sc.b.link.Key(), sc.reply(sc.b, encap.LinkAddr{Flags: encap.FlagRC, QPN: 0x999, GID: sc.b.link.GID}))
	}, "neigh_drop_spoofed neigh_recv_answers", "", "the packet has another source"},
	{"ARP: b with the multicast QPN", connected, func(sc *scene) ipoib.Event {
		return sc.arp(sc.b.link.Key(), sc.reply(sc.b,
			encap.LinkAddr{Flags: encap.FlagRC, QPN: ib.QPNMulticast, GID: sc.b.link.GID}))
	}, "neigh_drop_malformed", "", "cannot be read"},
	{"ARP: m asks in b's name", atRest, func(sc *scene) ipoib.Event {
		return sc.arp(sc.m.link, arp.NewRequest(encap.LinkAddr{QPN: sc.b.link.QPN, GID: sc.b.link.GID}, addr(1), addr(0)))
	}, "neigh_drop_spoofed neigh_recv_queries", "", "the packet has another source"},
	{"ARP: an answer that nobody asked for", connected, func(sc *scene) ipoib.Event {
		p := sc.reply(sc.m, encap.LinkAddr{Flags: encap.FlagRC, QPN: sc.m.link.QPN, GID: sc.m.link.GID})
		p.SenderIP = addr(77)
		return sc.arp(sc.m.link, p)
	}, "neigh_drop_unsolicited neigh_recv_answers", "", ""},
	{"NS: m asks in b's name", connected, func(sc *scene) ipoib.Event {
		b, err := nd.NewNS(netip.MustParseAddr("fd00::2"), netip.MustParseAddr("fd00::1"), sc.b.link).AppendBinary(nil)
		return sc.frame(sc.m.link, encap.IPv6, b, err)
	}, "neigh_drop_spoofed neigh_recv_queries", "", "the packet has another source"},
	{"NA: b without flags", connected, func(sc *scene) ipoib.Event {
		b, err := nd.NewAnnouncement(netip.MustParseAddr("fd00::2"), sc.b.link, false).AppendBinary(nil)
		return sc.frame(sc.m.link, encap.IPv6, b, err)
	}, "neigh_drop_spoofed neigh_recv_answers", "", "the packet has another source"},
}

// TestLies tells one machine what is not true, in every state that a lie could
// be meant for. Nothing changes but what it counts, a REQ is answered with one REJ at
// most, which goes to where the REQ came from, and monitor says why. Messages come
// from m's port unless it says otherwise: those "as b" have forged packets, too,
// and must then be wrong in what only the two ends know.
func TestLies(t *testing.T) {
	for _, tt := range lies {
		inband := strings.Contains(tt.counts, "inband")
		sc := stage(t, tt.when, inband || strings.Contains(tt.name, "in-band"))
		ev := tt.tell(sc)
		before, counts := sc.snapshot(sc.a), sc.a.counts()
		sc.notes, sc.items = nil, nil
		sc.step(0, ev)
		if got := risen(counts, sc.a.counts()); got != tt.counts {
			t.Errorf("%s, %s: counted %q, want %q", tt.name, tt.when, got, tt.counts)
		}
		if string(sc.snapshot(sc.a)) != string(before) {
			t.Errorf("%s, %s: the machine's state has changed; it says %q", tt.name, tt.when, sc.notes)
		}
		if got := sc.answers(); got != tt.answers {
			t.Errorf("%s, %s: answers %q, want %q", tt.name, tt.when, got, tt.answers)
		}
		if !strings.Contains(strings.Join(sc.notes, "\n"), tt.why) {
			t.Errorf("%s, %s: monitor shows %q, want %q", tt.name, tt.when, sc.notes, tt.why)
		}
	}
}

// A REQ whose packet is forged as well cannot be told from b's own. It may cost a
// queue pair for a while, and a pause before the next attempt of a, but never the
// connection that there is: b does not know the REP, and nothing is left over.
func TestForgedRedial(t *testing.T) {
	for _, inband := range []bool{false, true} {
		for _, moment := range []string{atRest, connected, accepted, closed} {
			sc := stage(t, moment, inband)
			from := asB
			if inband {
				from = inbandAsB
			}
			if moment == closed {
				sc.pass(5 * time.Second) // else TIMEWAIT goes meanwhile
			}
			path := sc.a.paths[1]
			before := sc.snapshot(sc.a)
			sc.step(0, sc.cm(from(sc), sc.req(sc.b)))
			if string(sc.snapshot(sc.a)) == string(before) {
				t.Errorf("%s, in-band %v: nothing has come of the REQ, so this shows nothing", moment, inband)
			}
			for range 60 {
				sc.deliver()
				sc.pass(time.Second)
				now := sc.a.paths[1]
				if now == path {
					continue
				}
				if path.Kind == nexthop.PathConn {
					t.Fatalf("%s, in-band %v: the path to b is %+v, want the connection %+v", moment, inband, now, path)
				}
				if now.Kind != nexthop.PathUD {
					t.Fatalf("%s, in-band %v: the path to b was %+v, now %+v, want datagrams", moment, inband, path, now)
				}
			}
			cs := sc.a.f.Conns()
			expect.Equal(t, len(cs), len(sc.a.qps), "%s, in-band %v: connections, one for each queue pair", moment, inband)
			if len(cs) > 1 {
				t.Errorf("%s, in-band %v: %d connections, want 1 at most: %+v", moment, inband, len(cs), cs)
			}
		}
	}
}

// REJs, and what monitor shows of them, are bounded however often a lie is told.
func TestRepeatedLies(t *testing.T) {
	sc := stage(t, connected, false)
	sc.limits = true
	sc.start(0, true) // a again, with its limits
	sc.pass(10 * time.Second)
	sc.items, sc.notes = nil, nil
	const times = 1000
	for range times {
		req := sc.req(sc.b)
		sc.step(0, sc.cm(asM(sc), req))
	}
	n := sc.a.counts()
	switch rejs := len(sc.items); {
	case rejs == 0:
		t.Errorf("no REJ was sent, want some")
	case rejs > 128:
		t.Errorf("rejs is %v, want at most 128", rejs)
	case n["cm_tx_rej"] != uint64(rejs):
		t.Errorf("n[\"cm_tx_rej\"] is %v, want %v", n["cm_tx_rej"], uint64(rejs))
	case n["cm_drop_req_rate"]+n["cm_drop_reply_rate"] != times-uint64(rejs):
		t.Errorf("n[\"cm_drop_req_rate\"]+n[\"cm_drop_reply_rate\"] is %v, want %v",
			n["cm_drop_req_rate"]+n["cm_drop_reply_rate"], times-uint64(rejs))
	}
	if len(sc.notes) > 3*128 || n["drops_not_told"] == 0 {
		t.Errorf("%d notes, %d drops not told", len(sc.notes), n["drops_not_told"])
	}
	if !strings.Contains(strings.Join(sc.notes, "\n"), "dropped: req_rate") {
		t.Errorf("no note tells that REQs are too many: %q", sc.notes[len(sc.notes)-3:])
	}
}

// dreq is the DREQ that b would send.
func (sc *scene) dreq() mad.DREQ {
	c := sc.mine()
	return mad.DREQ{LocalCommID: mad.CommID(c.RemoteComm), RemoteCommID: mad.CommID(c.LocalComm), RemoteQPN: c.LocalQPN}
}

// rej is the REJ that b would send, to a REQ or on a connection.
func (sc *scene) rej(r cm.Reason) mad.REJ {
	c := sc.mine()
	rej := mad.REJ{LocalCommID: mad.CommID(c.RemoteComm), RemoteCommID: mad.CommID(c.LocalComm), Reason: r}
	if c.State == "ESTABLISHED" {
		rej.MessageRejected = mad.KindOther
	}
	return rej
}
