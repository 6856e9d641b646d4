package ibverbs

import (
	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// A flow makes the packets of one direction of a QP for a tap. The kernel or the adapter makes the
// real packets, which we do not see. Those for the tap are made from work requests and completions:
// it sees no retransmission, and one acknowledgement per message.
type flow struct {
	src, dst  ib.GID
	transport ib.Transport
	qpn, peer ib.QPN // QPNs of sender and receiver
	pkey      ib.PKey
	qkey      ib.QKey // UD
	mtu       int     // octets of payload per packet
	label     uint32
	hops      uint8
	class     uint8
}

// A message is the content of one work request or completion that a flow shows to a tap.
type message struct {
	op         verbs.Opcode
	psn        ib.PSN
	imm        uint32
	remoteAddr uint64
	rkey       uint32
	solicited  bool
	payload    []byte
}

// packets returns how many packets carry n octets.
func packets(n, mtu int) int {
	if n == 0 || mtu <= 0 {
		return 1
	}
	return (n + mtu - 1) / mtu
}

// Opcodes in the order first, middle, last, last with immediate, only, only with immediate. They
// are those of RC; show puts in the bits of the transport.
var (
	sendOps = [...]roce.Opcode{roce.RCSendFirst, roce.RCSendMiddle, roce.RCSendLast, roce.RCSendLastImm,
		roce.RCSendOnly, roce.RCSendOnlyImm}
	writeOps = [...]roce.Opcode{roce.RCWriteFirst, roce.RCWriteMiddle, roce.RCWriteLast, roce.RCWriteLastImm,
		roce.RCWriteOnly, roce.RCWriteOnlyImm}
)

// show makes the packets of m and gives them to tap. It shows no READ requests.
func (f *flow) show(tap verbs.Tap, out bool, m message) {
	if m.op == verbs.Read {
		return
	}
	if f.transport == ib.UD {
		f.mtu = max(f.mtu, len(m.payload))
	}
	ops, imm := sendOps, m.op == verbs.SendImm || m.op == verbs.WriteImm || m.op == verbs.RecvWriteImm
	if m.op == verbs.Write || m.op == verbs.WriteImm {
		ops = writeOps
	}
	n := packets(len(m.payload), f.mtu)
	for i := range n {
		part := m.payload[min(i*f.mtu, len(m.payload)):min((i+1)*f.mtu, len(m.payload))]
		kind := 1
		switch {
		case n == 1:
			kind = 4
		case i == 0:
			kind = 0
		case i == n-1:
			kind = 2
		}
		if imm && (kind == 2 || kind == 4) {
			kind++
		}
		op := ops[kind].With(f.transport)
		b := f.begin(op, len(part), roce.BTHFields{
			Opcode: op, PKey: f.pkey, DestQPN: f.peer, PSN: m.psn.Add(i), AckReq: f.transport == ib.RC && i == n-1,
			Solicited: m.solicited && i == n-1, Pad: roce.Pad(len(part)),
		})
		var ext [16]byte
		if op.HasDETH() {
			roce.PutDETH(ext[:], f.qkey, f.qpn)
			b = append(b, ext[:roce.DETHLen]...)
		}
		if op.HasRETH() {
			roce.PutRETH(ext[:], m.remoteAddr, m.rkey, uint32(len(m.payload)))
			b = append(b, ext[:roce.RETHLen]...)
		}
		if op.HasImm() {
			roce.PutImmDt(ext[:], m.imm)
			b = append(b, ext[:roce.ImmDtLen]...)
		}
		f.end(tap, out, append(append(b, part...), make([]byte, roce.Pad(len(part)))...))
	}
}

// ack shows tap the acknowledgement of a message whose last packet has PSN psn.
func (f *flow) ack(tap verbs.Tap, out bool, psn ib.PSN, msn uint32) {
	b := f.begin(roce.RCAck, 0, roce.BTHFields{Opcode: roce.RCAck, PKey: f.pkey, DestQPN: f.peer, PSN: psn})
	var aeth [roce.AETHLen]byte
	roce.PutAETH(aeth[:], 0x1f, msn)
	f.end(tap, out, append(b, aeth[:]...))
}

// begin returns the IP and UDP headers and the BTH of a packet with n octets of payload.
func (f *flow) begin(op roce.Opcode, n int, bth roce.BTHFields) []byte {
	h := f.header()
	total := op.HeaderLen() + n + roce.Pad(n) + roce.ICRCLen
	b := h.Append(make([]byte, 0, h.Len()+total), total)
	b = append(b, make([]byte, roce.BTHLen)...)
	roce.PutBTH(b[len(b)-roce.BTHLen:], bth)
	return b
}

// end shows tap the packet b, which lacks its ICRC.
func (f *flow) end(tap verbs.Tap, out bool, b []byte) {
	h := f.header()
	sum := roce.NewFlow(h.Src, h.Dst).Sum(h.SrcPort, b[h.Len():], h.ID)
	b = append(b, make([]byte, roce.ICRCLen)...)
	sum.Put(b[len(b)-roce.ICRCLen:])
	tap(out, b)
}

func (f *flow) header() roce.IPHeader {
	return roce.IPHeader{Src: f.src.Addr(), Dst: f.dst.Addr(), TrafficClass: f.class, HopLimit: f.hops, FlowLabel: f.label,
		SrcPort: roce.SourcePort(f.label, f.qpn, f.peer)}
}

// gather returns a copy of the first n octets that an SG list names.
func gather(sg []verbs.SGE, n int) []byte {
	b := make([]byte, 0, n)
	for _, s := range sg {
		b = append(b, s.Buf[:min(len(s.Buf), n-len(b))]...)
	}
	return b
}
