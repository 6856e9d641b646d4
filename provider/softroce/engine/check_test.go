package engine

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// request returns a request packet for the QP 0xa1, with extension headers and payload in more.
func request(t *testing.T, f roce.BTHFields, more []byte) *roce.Packet {
	t.Helper()
	f.DestQPN = 0xa1
	if f.PKey == 0 {
		f.PKey = ib.DefaultPKey
	}
	b := make([]byte, roce.BTHLen, 600)
	roce.PutBTH(b, f)
	var pkt roce.Packet
	if err := pkt.Parse(append(append(b, more...), make([]byte, roce.ICRCLen)...)); err != nil {
		t.Fatal(err)
	}
	return &pkt
}

// What a packet must have so that a queue pair takes it (IBA 9.6).
func TestPacketChecks(t *testing.T) {
	peer := Source{Src: gidB, Dst: gidA}
	reth := make([]byte, roce.RETHLen+8)
	roce.PutRETH(reth, 0, 7, 8)
	for _, tt := range []struct {
		name string
		tr   ib.Transport
		op   roce.Opcode
		more []byte
		from Source
		no   verbs.Access // that the QP does not grant
		want DropReason
	}{
		{"as it should be", ib.RC, roce.RCSendOnly, []byte("12345678"), peer, 0, NoDrop},
		{"from another GID", ib.RC, roce.RCSendOnly, nil, Source{Src: gidA, Dst: gidA}, 0, DropSource},
		{"to another GID of the port", ib.RC, roce.RCSendOnly, nil, Source{Src: gidB, Dst: ib.GID{15: 3}}, 0, DropSource},
		{"UC for RC", ib.RC, roce.RCSendOnly.With(ib.UC), nil, peer, 0, DropOpcode},
		{"RC for UC", ib.UC, roce.RCSendOnly, nil, peer, 0, DropOpcode},
		{"WRITE with the right", ib.RC, roce.RCWriteOnly, reth, peer, 0, NoDrop},
		{"WRITE without the right of the QP", ib.RC, roce.RCWriteOnly, reth, peer, verbs.RemoteWrite, DropAccess},
		{"READ without the right of the QP", ib.RC, roce.RCReadRequest, reth[:roce.RETHLen], peer, verbs.RemoteRead, DropAccess},
	} {
		p := newPair(t, tt.tr, func(_ *Config, attr *verbs.QPAttr) { attr.Access &^= tt.no })
		p.a.mem[7] = &mem{buf: make([]byte, 8), access: verbs.RemoteRead | verbs.RemoteWrite}
		if _, err := p.a.PostRecv([]verbs.RecvWR{{SG: sg(make([]byte, 8))}}); err != nil {
			t.Fatal(err)
		}
		pkt := request(t, roce.BTHFields{Opcode: tt.op, PSN: 0xfffffe}, tt.more)
		if got := p.a.Receive(pkt, &tt.from, p.now); got != tt.want {
			t.Errorf("%s: dropped as %v, want %v", tt.name, got, tt.want)
		}
	}
}

// The Q_Key of a datagram, both ways, and one that does not fit (IBA 9.6, 10.2).
func TestDatagramChecks(t *testing.T) {
	p := newPair(t, ib.UD, nil)
	a := p.a
	send := func(qkey ib.QKey, n int) DropReason {
		deth := make([]byte, roce.DETHLen+n)
		roce.PutDETH(deth, qkey, 0xa2)
		return a.Receive(request(t, roce.BTHFields{Opcode: roce.UDSendOnly}, deth), &Source{Src: gidB, Dst: gidA}, p.now)
	}
	if _, err := a.PostRecv([]verbs.RecvWR{{SG: sg(make([]byte, verbs.GRHLen+8))}}); err != nil {
		t.Fatal(err)
	}
	if got := send(0xb1c, 8); got != DropQKey {
		t.Errorf("another Q_Key: dropped as %v, want %v", got, DropQKey)
	}
	if got := send(0xb1b, 12); got != DropTooLong {
		t.Errorf("longer than the buffer: dropped as %v, want %v", got, DropTooLong)
	}
	if got := send(0xb1b, 8); got != NoDrop {
		t.Errorf("as it should be: dropped as %v", got)
	}
	for _, tt := range []struct{ given, want ib.QKey }{{0x123, 0x123}, {ib.ControlledQKey | 1, 0xb1b}} {
		wr := verbs.SendWR{Opcode: verbs.Send, AH: struct{ verbs.AH }{}, RemoteQPN: 0xa2, RemoteQKey: tt.given, SG: sg(make([]byte, 8))}
		if _, err := a.PostSend([]verbs.SendWR{wr}, p.now); err != nil {
			t.Fatal(err)
		}
		var pkt roce.Packet
		if err := pkt.Parse(p.output(a)[0]); err != nil {
			t.Fatal(err)
		}
		if got := pkt.DETH().QKey(); got != tt.want {
			t.Errorf("Q_Key %#x: sent %#x, want %#x", tt.given, got, tt.want)
		}
	}
}

// A READ is refused if as many as were agreed on are being answered (IBA 9.7).
func TestReadsAreBounded(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	p.a.mem[7] = &mem{buf: make([]byte, 8), access: verbs.RemoteRead}
	reth := make([]byte, roce.RETHLen)
	roce.PutRETH(reth, 0, 7, 8)
	for i := range 5 {
		want := NoDrop
		if i == 4 { // MaxDestRDAtomic of the pair
			want = DropReadBusy
		}
		pkt := request(t, roce.BTHFields{Opcode: roce.RCReadRequest, PSN: ib.PSN(0xfffffe).Add(i)}, reth)
		if got := p.a.Receive(pkt, &Source{Src: gidB, Dst: gidA}, p.now); got != want {
			t.Errorf("READ %d: dropped as %v, want %v", i, got, want)
		}
	}
}

// A READ that is being answered again may be for nobody any more: its requester has got the first
// answer and given the memory back. The queue pair goes on. While it is answered for the first time, memory
// that goes is an error.
func TestReadOfMemoryThatGoes(t *testing.T) {
	for _, again := range []bool{false, true} {
		p := newPair(t, ib.RC, nil)
		a := p.a
		a.mem[7] = &mem{buf: make([]byte, 600), access: verbs.RemoteRead}
		reth := make([]byte, roce.RETHLen)
		roce.PutRETH(reth, 0, 7, 600)
		ask := func(psn ib.PSN) {
			t.Helper()
			a.Receive(request(t, roce.BTHFields{Opcode: roce.RCReadRequest, PSN: psn}, reth), &Source{Src: gidB, Dst: gidA}, p.now)
		}
		ask(0xfffffe)
		if again {
			if got := len(p.output(a)); got != 3 {
				t.Fatalf("%d responses, want 3", got)
			}
			ask(0xfffffe)
		}
		if n := a.Output(a.pkts[:1], p.now); n != 1 {
			t.Fatalf("%d packets in a buffer for one", n)
		}
		delete(a.mem, 7)
		p.output(a)
		want := verbs.StateError
		if again {
			want = verbs.StateRTS
		}
		if got := a.State(); got != want {
			t.Errorf("asked again %v: the state is %v, want %v", again, got, want)
		}
		if !again {
			continue
		}
		a.mem[7] = &mem{buf: make([]byte, 600), access: verbs.RemoteRead}
		ask(ib.PSN(0xfffffe).Add(3))
		if got := len(p.output(a)); got != 3 {
			t.Errorf("%d responses to the next READ, want 3", got)
		}
	}
}

// The solicited event is in the last packet of a message, and in no other (IBA 9.2).
func TestSolicitedIsInTheLastPacket(t *testing.T) {
	p := newPair(t, ib.RC, nil)
	wr := verbs.SendWR{Opcode: verbs.Send, Flags: verbs.Solicited, SG: sg(make([]byte, 600))}
	if _, err := p.a.PostSend([]verbs.SendWR{wr}, p.now); err != nil {
		t.Fatal(err)
	}
	out := p.output(p.a)
	if len(out) != 3 {
		t.Fatalf("%d packets, want 3", len(out))
	}
	for i, b := range out {
		if got, want := roce.BTH(b).Solicited(), i == 2; got != want {
			t.Errorf("packet %d: solicited %v, want %v", i, got, want)
		}
	}
}

// The message sequence number has 24 bits, and wraps (IBA 9.7.7.1).
func TestMSNWraps(t *testing.T) {
	for _, tt := range []struct{ before, want uint32 }{{0xffff, 0x10000}, {0xffffff, 0}} {
		p := newPair(t, ib.RC, nil)
		p.a.QP.rsp.msn = tt.before
		if _, err := p.a.PostRecv([]verbs.RecvWR{{SG: sg(make([]byte, 8))}}); err != nil {
			t.Fatal(err)
		}
		pkt := request(t, roce.BTHFields{Opcode: roce.RCSendOnly, PSN: 0xfffffe, AckReq: true}, nil)
		p.a.Receive(pkt, &Source{Src: gidB, Dst: gidA}, p.now)
		var ack roce.Packet
		if err := ack.Parse(p.output(p.a)[0]); err != nil {
			t.Fatal(err)
		}
		if got := ack.AETH().MSN(); got != tt.want {
			t.Errorf("after %#x came %#x, want %#x", tt.before, got, tt.want)
		}
	}
}
