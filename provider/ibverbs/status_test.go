package ibverbs

import (
	"slices"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
)

func TestStatus(t *testing.T) {
	for _, tt := range []struct {
		raw        uint32
		sent, recv verbs.Status
	}{
		{0, verbs.Success, verbs.Success},
		{1, verbs.LocalLengthError, verbs.LocalLengthError},
		{wcLocalEEC, verbs.LocalQPOpError, verbs.LocalQPOpError},
		{5, verbs.WRFlushError, verbs.WRFlushError},
		{wcMWBind, verbs.LocalQPOpError, verbs.LocalQPOpError},
		{wcBadResponse, verbs.GeneralError, verbs.GeneralError},
		{wcLocalAccess, verbs.LocalProtError, verbs.LocalProtError},
		{9, verbs.RemoteInvReq, verbs.LocalLengthError},
		{10, verbs.RemoteAccess, verbs.WRFlushError},
		{11, verbs.RemoteOpError, verbs.WRFlushError},
		{12, verbs.RetryExceeded, verbs.RetryExceeded},
		{13, verbs.RNRExceeded, verbs.RNRExceeded},
		{wcLocalRDDViolate, verbs.LocalQPOpError, verbs.LocalQPOpError},
		{22, verbs.GeneralError, verbs.GeneralError}, // what we have no name for
		{300, verbs.GeneralError, verbs.GeneralError},
	} {
		if s, r := sendStatus(tt.raw), recvStatus(tt.raw); s != tt.sent || r != tt.recv {
			t.Errorf("%d is %v sent and %v received; want %v and %v", tt.raw, s, r, tt.sent, tt.recv)
		}
	}
}

func TestFlags(t *testing.T) {
	for _, tt := range []struct {
		raw  uint32
		ud   bool
		want verbs.WCFlags
	}{
		{wcGRH, true, verbs.WithGRH},
		{wcGRH, false, 0}, // rdma_rxe sets it on RC too
		{wcGRH | wcWithImm, true, verbs.WithGRH | verbs.WithImm},
		{wcWithInv, false, verbs.WithInv},
		{0, true, 0},
	} {
		if got := recvFlags(tt.raw, tt.ud); got != tt.want {
			t.Errorf("%#x, UD %v: %v, want %v", tt.raw, tt.ud, got, tt.want)
		}
	}
	if f := sendFlags(verbs.Signaled | verbs.Solicited | verbs.Fence); f != sendSignaled|sendSolicited|sendFence {
		t.Errorf("send flags are %#x", f)
	}
	if recvOpcode(wcRecv) != verbs.Recv || recvOpcode(wcRecvRDMAImm) != verbs.RecvWriteImm {
		t.Error("opcodes of receives")
	}
	for _, op := range []verbs.Opcode{verbs.Send, verbs.SendImm, verbs.Write, verbs.WriteImm, verbs.Read} {
		k := wrKinds[op]
		switch {
		case !k.rc:
			t.Errorf("%v: k's rc is false, want true", op)
		case k.uc == (op == verbs.Read):
			t.Errorf("%v: k's uc is %v, want another than %v", op, k.uc, (op == verbs.Read))
		case k.imm != (op == verbs.SendImm || op == verbs.WriteImm):
			t.Errorf("%v: k's imm is %v, want %v", op, k.imm, (op == verbs.SendImm || op == verbs.WriteImm))
		case k.remote != (op >= verbs.Write):
			t.Errorf("%v: k's remote is %v, want %v", op, k.remote, (op >= verbs.Write))
		}
	}
	if codes := []uint32{wrKinds[verbs.Write].opcode, wrKinds[verbs.WriteImm].opcode, wrKinds[verbs.Send].opcode,
		wrKinds[verbs.SendImm].opcode, wrKinds[verbs.Read].opcode}; !slices.Equal(codes, []uint32{0, 1, 2, 3, 4}) {
		t.Errorf("opcodes are %v", codes)
	}
}

func TestAsync(t *testing.T) {
	for _, tt := range []struct {
		event  int
		want   asyncAction
		status verbs.Status
	}{
		{evCQError, asyncCQDied, verbs.GeneralError},
		{evQPFatal, asyncQPDied, verbs.GeneralError},
		{evQPRequest, asyncQPDied, verbs.LocalQPOpError},
		{evQPAccess, asyncQPDied, verbs.LocalProtError},
		{evCommEst, asyncComm, verbs.GeneralError},
		{evSQDrained, asyncNothing, verbs.GeneralError},
		{evDeviceFatal, asyncFatal, verbs.GeneralError},
		{evPortActive, asyncPort, verbs.GeneralError},
		{evPortError, asyncPort, verbs.GeneralError},
		{evLIDChange, asyncPort, verbs.GeneralError},
		{evPKeyChange, asyncPort, verbs.GeneralError},
		{evSMChange, asyncPort, verbs.GeneralError},
		{evLastWQE, asyncNothing, verbs.GeneralError},
		{evReregister, asyncRegister, verbs.GeneralError},
		{evGIDChange, asyncPort, verbs.GeneralError},
		{99, asyncNothing, verbs.GeneralError},
	} {
		if got := asyncOf(tt.event); got != tt.want || asyncStatus(tt.event) != tt.status {
			t.Errorf("event %d: %d, %v; want %d, %v", tt.event, got, asyncStatus(tt.event), tt.want, tt.status)
		}
	}
}

func TestPortEvents(t *testing.T) {
	up := verbs.Port{Active: true, GIDs: []ib.GID{gid("fe80::1"), gid("10.0.0.1")}, MTU: ib.MTU1024, UnderMTU: 1500,
		UnderlayIf: "eth0"}
	for _, tt := range []struct {
		name   string
		change func(*verbs.Port)
		want   []verbs.EventKind
	}{
		{"nothing", func(*verbs.Port) {}, nil},
		{"link down", func(p *verbs.Port) { p.Active = false }, []verbs.EventKind{verbs.PortError}},
		{"an address gone", func(p *verbs.Port) { p.GIDs = p.GIDs[:1] }, []verbs.EventKind{verbs.GIDChange}},
		{"all addresses gone", func(p *verbs.Port) { p.Active, p.GIDs = false, nil },
			[]verbs.EventKind{verbs.PortError, verbs.GIDChange}},
		{"jumbo frames", func(p *verbs.Port) { p.UnderMTU, p.MTU = 5000, ib.MTU4096 }, []verbs.EventKind{verbs.MTUChange}},
	} {
		now := up
		tt.change(&now)
		for _, way := range []struct {
			old, now verbs.Port
			back     bool
		}{{up, now, false}, {now, up, true}} {
			var got []verbs.EventKind
			for _, ev := range portEvents(&way.old, &way.now) {
				if way.back && ev.Kind == verbs.PortActive {
					ev.Kind = verbs.PortError // the opposite
				}
				got = append(got, ev.Kind)
			}
			if !slices.Equal(got, tt.want) {
				t.Errorf("%s (back: %v): %v, want %v", tt.name, way.back, got, tt.want)
			}
		}
	}
}

// Kernel Soft-RoCE would never give up with 7.
func TestRetryCount(t *testing.T) {
	for n, want := range []uint8{0, 1, 2, 3, 4, 5, 6, 6} {
		if got := retryCount(uint8(n)); got != want {
			t.Errorf("retry count %d becomes %d, want %d", n, got, want)
		}
	}
}
