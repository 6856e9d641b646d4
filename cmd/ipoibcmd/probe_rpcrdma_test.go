package main

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/provider/softiwarp"
	"ipoibcm/provider/softroce"
	"ipoibcm/rdmacm"
	"ipoibcm/rpcrdma"
	"ipoibcm/rpcrdma/transport"
	"ipoibcm/verbs"
)

// serveRPC accepts connections at 127.0.0.2 until the test ends, and returns
// the address to probe.
func serveRPC(t *testing.T, carrier string, opt transport.Options) string {
	t.Helper()
	local := netip.MustParseAddr("127.0.0.2")
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	if carrier == "iwarp" {
		dev, err := softiwarp.Open(softiwarp.Options{Addr: local, Port: -1})
		if err != nil {
			t.Fatal(err)
		}
		ln, err := net.Listen("tcp", "127.0.0.2:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			defer close(done)
			for {
				conn, err := ln.Accept()
				if err != nil {
					return
				}
				if e, err := transport.AcceptIWARP(ctx, dev, conn, opt); err == nil {
					defer e.Close()
				}
			}
		}()
		t.Cleanup(func() {
			cancel()
			ln.Close()
			<-done
			dev.Close()
		})
		return ln.Addr().String()
	}
	dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: ib.GID(local.As16())})
	if err != nil {
		t.Fatal(err)
	}
	port, err := rdmacm.Open(rdmacm.Options{Provider: dev})
	if err != nil {
		t.Fatal(err)
	}
	l, err := port.Listen(nfsPort)
	if err != nil {
		t.Fatal(err)
	}
	opt.Provider = dev
	go func() {
		defer close(done)
		for {
			r, err := l.Next(ctx)
			if err != nil {
				return
			}
			if e, err := transport.AcceptRoCE(r, opt); err == nil {
				defer e.Close()
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		port.Close()
		dev.Close()
	})
	return "127.0.0.2"
}

// probeRPC runs the program.
func probeRPC(t *testing.T, args ...string) (status int, text string, doc control.RPCProbe) {
	t.Helper()
	c := program(t, append([]string{"probe", "rpcrdma"}, args...)...)
	out, err := c.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		status = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(string(out), "{") {
		if err := json.Unmarshal(out, &doc); err != nil {
			t.Fatal(err)
		}
	}
	return status, string(out), doc
}

func nfs(_ context.Context, s rpcrdma.Serve) rpcrdma.Event {
	call, _, err := rpcrdma.ParseRPCCall(s.Payload)
	reply := rpcrdma.RPCReply{}
	switch {
	case err != nil || call.Prog != nfsProgram:
		reply.Status = rpcrdma.RPCProgUnavail
	case call.Vers != nfsVersion:
		reply.Status, reply.Low, reply.High = rpcrdma.RPCProgMismatch, 3, 4
	}
	return rpcrdma.Answer{Payload: reply.Append(nil)}
}

func TestProbeRPC(t *testing.T) {
	for _, carrier := range []string{"roce", "iwarp"} {
		t.Run(carrier, func(t *testing.T) {
			addr := serveRPC(t, carrier, transport.Options{Serve: nfs,
				RPC: rpcrdma.Options{SendSize: 8192, RecvSize: 2048, Grant: 5}})
			status, _, d := probeRPC(t, addr, "--transport", carrier, "--json", "--count", "4")
			expect.Equal(t, status, 0, "status")
			expect.Equal(t, d.Outcome, "answered", "Outcome")
			expect.Equal(t, d.Agreed, 2, "Agreed")
			expect.Equal(t, d.Offered, 2, "Offered")
			expect.Equal(t, d.Refused, 0, "Refused")
			expect.Equal(t, d.Granted, 5, "Granted")
			expect.Equal(t, len(d.NullMS), 4, "length of NullMS")
			expect.Equal(t, d.Status, "SUCCESS", "Status")
			switch {
			case d.Sent == nil:
				t.Error("private data: Sent is nil")
			case d.Sent.SendSize != 4096:
				t.Errorf("private data: Sent.SendSize is %v, want 4096", d.Sent.SendSize)
			case d.Received == nil:
				t.Error("private data: Received is nil")
			case d.Received.SendSize != 8192:
				t.Errorf("private data: Received.SendSize is %v, want 8192", d.Received.SendSize)
			case d.Received.RecvSize != 2048:
				t.Errorf("private data: Received.RecvSize is %v, want 2048", d.Received.RecvSize)
			case d.Received.At != 0:
				t.Errorf("private data: Received.At is %v, want 0", d.Received.At)
			case !strings.HasPrefix(d.Received.Hex, "f6ab0e1801"):
				t.Errorf("private data: %q does not begin with \"f6ab0e1801\"", d.Received.Hex)
			case !d.Received.RemoteInv:
				t.Error("private data: Received.RemoteInv is false, want true")
			}
			status, text, _ := probeRPC(t, addr, "--transport", carrier)
			for _, want := range []string{"version          2 (offered 2)", "4096 octets to the peer",
				"100003 version 4: SUCCESS", "NULL             3 calls", "\nanswered\n"} {
				if status != 0 || !strings.Contains(text, want) {
					t.Errorf("%q is not in\n%s", want, text)
				}
			}
			status, _, d = probeRPC(t, addr, "--transport", carrier, "--json", "--rpcrdma", "1", "--version", "9")
			expect.Equal(t, status, 1, "program version 9: status")
			expect.Equal(t, d.Outcome, "refused", "program version 9: Outcome")
			expect.Equal(t, d.Agreed, 1, "program version 9: Agreed")
			expect.Equal(t, d.RecvInline, 4096, "program version 9: RecvInline")
			expect.Equal(t, d.SendInline, 2048, "program version 9: SendInline")
			if !strings.Contains(d.Status, "versions 3 to 4") {
				t.Errorf("program version 9: Status is %q, want versions 3 to 4 in it", d.Status)
			}
			status, _, d = probeRPC(t, addr, "--transport", carrier, "--json", "--vers-only", "--program", "0x20000001")
			expect.Equal(t, status, 0, "status")
			expect.Equal(t, d.Agreed, 2, "Agreed")
			expect.Equal(t, len(d.NullMS), 0, "length of NullMS")
		})
	}
}

// A server that speaks version one only.
func TestProbeRPCVersionOne(t *testing.T) {
	addr := serveRPC(t, "roce", transport.Options{Serve: nfs, RPC: rpcrdma.Options{MaxVersion: 1}})
	status, text, d := probeRPC(t, addr, "--json")
	expect.Equal(t, status, 0, "%s: status", text)
	expect.Equal(t, d.Agreed, 1, "Agreed")
	expect.Equal(t, d.Refused, 2, "Refused")
	expect.Equal(t, d.SendInline, 4096, "SendInline")
}

// serveOld is a server at 127.0.0.2 that has never heard of version two and says
// nothing to it.
func serveOld(t *testing.T) {
	t.Helper()
	dev, err := softroce.Open(softroce.Options{Underlay: "lo", GID: ib.GID(netip.MustParseAddr("127.0.0.2").As16())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dev.Close() })
	port, err := rdmacm.Open(rdmacm.Options{Provider: dev})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(port.Close)
	l, err := port.Listen(nfsPort)
	if err != nil {
		t.Fatal(err)
	}
	cq, err := dev.CreateCQ(64)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := dev.Alloc(5000)
	if err != nil {
		t.Fatal(err)
	}
	qp, err := dev.CreateQP(verbs.QPInit{Transport: ib.RC, SendCQ: cq, RecvCQ: cq, SendDepth: 16, RecvDepth: 16,
		MaxSendSGE: 1, MaxRecvSGE: 1})
	if err == nil {
		err = qp.Modify(verbs.QPAttr{State: verbs.StateInit, PKey: ib.DefaultPKey})
	}
	if err != nil {
		t.Fatal(err)
	}
	in, out := mem.Buf[:4096], mem.Buf[4096:]
	wait := []verbs.RecvWR{{SG: []verbs.SGE{{Region: mem, Buf: in}}}}
	if _, err := qp.PostRecv(wait); err != nil {
		t.Fatal(err)
	}
	go func() {
		if r, err := l.Next(context.Background()); err == nil {
			_, _ = r.Begin(rdmacm.Setup{QP: qp, RNRRetry: 7})
		}
		var wcs [4]verbs.WC
		for cq.Wait() == nil {
			for _, wc := range wcs[:cq.Poll(wcs[:])] {
				if wc.Status != verbs.Success || wc.Opcode != verbs.Recv {
					continue
				}
				if h, _, err := rpcrdma.ParseHeader(in[:wc.ByteLen]); err == nil && h.Vers == rpcrdma.Version1 {
					answer, _ := (&rpcrdma.Header{XID: h.XID, Vers: 1, Credit: 1}).AppendBinary(out[:0])
					answer = (&rpcrdma.RPCReply{XID: h.XID}).Append(answer)
					_, _ = qp.PostSend([]verbs.SendWR{{Opcode: verbs.Send, SG: []verbs.SGE{{Region: mem, Buf: answer}}}})
				}
				_, _ = qp.PostRecv(wait)
			}
		}
	}()
}

// A server that does not answer version two is asked in version one in time.
func TestProbeRPCOldServer(t *testing.T) {
	serveOld(t)
	status, text, d := probeRPC(t, "127.0.0.2", "--timeout", "20s", "--count", "1", "--json")
	expect.Equal(t, status, 0, "%s: status", text)
	expect.Equal(t, d.Agreed, 1, "Agreed")
	expect.Equal(t, d.Refused, 0, "Refused")
	expect.Equal(t, d.Outcome, "answered", "Outcome")
}

func TestProbeRPCFailures(t *testing.T) {
	for _, tt := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"127.0.0.9", "--timeout", "300ms"}, 1, "no connection within 300ms"},
		{[]string{"127.0.0.9:1", "--transport", "iwarp", "--timeout", "20s"}, 1, "refused"},
		{[]string{"127.0.0.9:0"}, 2, ""},
		{[]string{"127.0.0.9:http"}, 2, ""},
		{[]string{"127.0.0.9", "--program", "mount"}, 2, ""},
		{[]string{"127.0.0.9", "--transport", "tcp"}, 2, ""},
		{[]string{"127.0.0.9", "--count", "0"}, 2, ""},
		{[]string{"127.0.0.9", "--rpcrdma", "3"}, 2, ""},
		{[]string{"127.0.0.9", "--send-size", "7"}, 2, ""},
		{[]string{}, 2, ""},
	} {
		start := time.Now()
		if status, text, _ := probeRPC(t, tt.args...); status != tt.status || !strings.Contains(text, tt.want) {
			t.Errorf("%q: status %d: %s", tt.args, status, text)
		}
		if took := time.Since(start); took > 30*time.Second {
			t.Errorf("%q took %v", tt.args, took)
		}
	}
}
