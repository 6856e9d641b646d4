package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
	"ipoibcm/internal/ownnet"
)

// TestMain lets the test binary be the program. The tests run in a network
// namespace of their own.
func TestMain(m *testing.M) {
	if os.Getenv("IPOIBCMD_TEST_PROGRAM") != "" {
		os.Exit(execute(context.Background(), os.Args[1:]))
	}
	ownnet.Main(m, nil)
}

// program runs the program as a process.
func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	c := exec.CommandContext(ctx, os.Args[0], args...)
	c.Env = append(os.Environ(), "IPOIBCMD_TEST_PROGRAM=1")
	return c
}

type probed struct {
	status int
	text   string
	json   control.MPAProbe
}

func (p *probed) finish(t *testing.T, err error) {
	t.Helper()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		p.status = exit.ExitCode()
	} else if err != nil {
		t.Fatal(err)
	}
	if strings.HasPrefix(p.text, "{") {
		if err := json.Unmarshal([]byte(p.text), &p.json); err != nil {
			t.Fatalf("%v\n%s", err, p.text)
		}
	}
}

// listening starts "probe mpa --listen" and returns its address, and a function
// that waits for its end.
func listening(t *testing.T, args ...string) (addr string, end func() probed) {
	t.Helper()
	c := program(t, append([]string{"probe", "mpa", "--listen", "127.0.0.1:0"}, args...)...)
	var out strings.Builder
	c.Stdout = &out
	stderr, err := c.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(stderr)
	line, err := r.ReadString('\n')
	addr, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		t.Fatalf("%q, %v", line, err)
	}
	return addr, func() (p probed) {
		t.Helper()
		_, _ = io.Copy(io.Discard, r)
		err := c.Wait()
		p.text = out.String()
		p.finish(t, err)
		return p
	}
}

func connecting(t *testing.T, addr string, args ...string) (p probed) {
	t.Helper()
	out, err := program(t, append([]string{"probe", "mpa", addr}, args...)...).Output()
	p.text = string(out)
	p.finish(t, err)
	return p
}

// mpaProbes are both ends of a negotiation, how it ends and what they say of it.
var mpaProbes = []struct {
	name            string
	listen, connect string
	outcome         [2]string // of the responder and of the initiator
	check           func(t *testing.T, r, i *control.MPAProbe)
}{
	{"defaults", "", "", [2]string{"established", "established"}, func(t *testing.T, r, i *control.MPAProbe) {
		got := *i.Settled
		got.MULPDU = 0 // of the segment size of TCP
		expect.Equal(t, got, control.MPASettled{Revision: 2, Enhanced: true, RTR: "none", IRD: 16, ORD: 16}, "Settled")
		expect.Equal(t, r.Settled.ORD, 16, "the responder's ORD")
	}},
	{"peer-to-peer", "--ird 3 --ord 9 --rtr write,read --crc",
		"--peer-to-peer --ird 8 --ord 4 --rtr read,send --markers", [2]string{"established", "established"},
		func(t *testing.T, r, i *control.MPAProbe) {
			expect.Equal(t, i.Settled.RTR, "read", "the initiator's RTR")
			expect.Equal(t, r.Settled.RTR, "read", "the responder's RTR")
			expect.Equal(t, i.Settled.ORD, 3, "the initiator's ORD")
			expect.Equal(t, r.Settled.ORD, 8, "the responder's ORD")
			expect.Equal(t, i.Settled.CRC, true, "CRC")
			expect.Equal(t, i.Settled.SendMarkers, false, "the initiator's SendMarkers")
			expect.Equal(t, r.Settled.SendMarkers, true, "the responder's SendMarkers")
			expect.Equal(t, *i.Frames[0].Enhanced.IRD, 8, "IRD of the request")
			expect.Equal(t, *i.Frames[1].Enhanced.ORD, 8, "ORD of the reply")
			expect.Equal(t, strings.Join(i.Frames[0].Enhanced.RTR, "+"), "send+read", "RTR of the request")
			if !slices.Contains([]string{"Read Response of 0 octets", ""}, i.FirstMessage) {
				t.Errorf("the initiator's FirstMessage is %q, want a Read Response of 0 octets or none", i.FirstMessage)
			}
			if !strings.HasPrefix(r.FirstMessage, "RTR indication: Read Request") {
				t.Errorf("the responder's FirstMessage is %q, want a Read Request", r.FirstMessage)
			}
		}},
	{"revision 1", "", "--revision 1 --private-data text:hello", [2]string{"established", "established"},
		func(t *testing.T, r, i *control.MPAProbe) {
			expect.Equal(t, i.Settled.Revision, 1, "Revision")
			expect.Equal(t, i.Settled.Enhanced, false, "Enhanced")
			if e := r.Frames[0].Enhanced; e != nil {
				t.Errorf("the request has enhanced data %+v, want none", *e)
			}
			expect.Equal(t, r.Frames[0].Private.Hex, "68656c6c6f", "private data of the request")
		}},
	{"left to the ULP", "", "--ird ulp --ord ulp", [2]string{"established", "established"},
		func(t *testing.T, r, i *control.MPAProbe) {
			for _, f := range i.Frames {
				if n := f.Enhanced.IRD; n != nil {
					t.Errorf("IRD of the %s is %d, want null", f.Kind, *n)
				}
				if n := f.Enhanced.ORD; n != nil {
					t.Errorf("ORD of the %s is %d, want null", f.Kind, *n)
				}
			}
		}},
	{"RFC 8797", "--private-data f6ab0e1801000303", "--private-data f6ab0e1801010300",
		[2]string{"established", "established"}, func(t *testing.T, r, i *control.MPAProbe) {
			expect.Equal(t, r.Frames[0].Private.Meaning, "RFC 8797 version 1: remote invalidation yes, send size 4096, "+
				"receive size 1024", "the request's Meaning")
			if m := i.Frames[1].Private.Meaning; !strings.Contains(m, "invalidation no") {
				t.Errorf("the reply's Meaning is %q, want invalidation no in it", m)
			}
		}},
	{"needs more ORD", "--need-ord 20", "", [2]string{"rejected", "rejected"},
		func(t *testing.T, r, i *control.MPAProbe) {
			reply := i.Frames[1]
			if reply.Enhanced == nil {
				t.Fatal("the reply is not enhanced")
			}
			expect.Equal(t, *reply.Enhanced.ORD, 20, "ORD of the reply")
			expect.Equal(t, reply.Reject, true, "Reject of the reply")
			expect.Equal(t, *r.Code, 6, "the responder's Code")
			expect.Equal(t, r.Clause, "RFC 6581 section 9.1", "the responder's Clause")
		}},
	{"rejected", "--reject", "--peer-to-peer", [2]string{"rejected", "rejected"},
		func(t *testing.T, r, i *control.MPAProbe) {
			if i.Clause == "" {
				t.Error("Clause is empty")
			}
			expect.Equal(t, i.Reason, "peer_rejected", "Reason")
		}},
	{"no RTR in common", "--rtr send", "--peer-to-peer --rtr write", [2]string{"failed", "failed"},
		func(t *testing.T, r, i *control.MPAProbe) {
			expect.Equal(t, *i.Code, 7, "the initiator's Code")
			expect.Equal(t, i.Clause, "RFC 6581 section 9.2", "the initiator's Clause")
			expect.Equal(t, i.Reason, "no_rtr", "the initiator's Reason")
			expect.Equal(t, *r.Code, 7, "the responder's Code")
			expect.Equal(t, r.Terminate, "2/0/7 no matching RTR option", "the responder's Terminate")
		}},
	{"too little IRD", "--need-ord 5 --ord 5", "--ird 4 --max-ird 4", [2]string{"rejected", "rejected"}, nil},
	{"old responder", "--revision 1", "--peer-to-peer", [2]string{"failed", "failed"},
		func(t *testing.T, r, i *control.MPAProbe) {
			expect.Equal(t, *i.Code, 1, "the initiator's Code")
			expect.Equal(t, *r.Code, 4, "the responder's Code")
			expect.Equal(t, r.Reason, "enhanced_request", "the responder's Reason")
			expect.Equal(t, r.Counters["enhanced_request"], 1, "the responder's enhanced_request")
		}},
}

// TestProbeMPA runs the program at both ends.
func TestProbeMPA(t *testing.T) {
	for _, tt := range mpaProbes {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			addr, end := listening(t, append(strings.Fields(tt.listen), "--json")...)
			i := connecting(t, addr, append(strings.Fields(tt.connect), "--json")...)
			r := end()
			for k, p := range []*probed{&r, &i} {
				want := 1
				if tt.outcome[k] == "established" {
					want = 0
				}
				expect.Equal(t, p.json.Outcome, tt.outcome[k], "%s: Outcome", p.json.Role)
				expect.Equal(t, p.status, want, "%s: status", p.json.Role)
				expect.Equal(t, p.json.Version, control.Version, "%s: Version", p.json.Role)
				if (p.json.Error == "") != (want == 0) {
					t.Errorf("%s: error %q", p.json.Role, p.json.Error)
				}
			}
			expect.Equal(t, i.json.Role, "initiator", "Role")
			expect.Equal(t, r.json.Role, "responder", "Role")
			expect.Equal(t, i.json.Remote, addr, "Remote")
			if tt.check != nil && !t.Failed() {
				tt.check(t, &r.json, &i.json)
			}
		})
	}
}

// TestProbeMPAText: what people see.
func TestProbeMPAText(t *testing.T) {
	addr, end := listening(t, "--need-ord", "20")
	i, r := connecting(t, addr, "--private-data", "f6ab0e1801010303"), probed{}
	r = end()
	for _, want := range []string{"request  sent     revision 2, flags S",
		"asked          IRD 16, ORD 16, client-server", "offered        IRD 16, ORD 20", "flags R S",
		"RFC 8797 version 1", "outcome  rejected", "RFC 5044 section 7.1.2"} {
		if !strings.Contains(i.text, want) {
			t.Errorf("no %q in\n%s", want, i.text)
		}
	}
	for _, want := range []string{"code 6 (layer 2, type 0): insufficient IRD resources", "RFC 6581 section 9.1"} {
		if !strings.Contains(r.text, want) {
			t.Errorf("no %q in\n%s", want, r.text)
		}
	}
	addr, end = listening(t, "--crc")
	i = connecting(t, addr, "--peer-to-peer", "--ird", "ulp")
	end()
	for _, want := range []string{"IRD 0x3FFF (left to the ULP)", "peer-to-peer (A), RTR send, write, read",
		"settled  IRD 16, ORD 16, peer-to-peer, RTR write", "CRC yes", "outcome  established"} {
		if !strings.Contains(i.text, want) {
			t.Errorf("no %q in\n%s", want, i.text)
		}
	}
}

// badMPAPeers are peers that speak no MPA, or not to the end.
var badMPAPeers = []struct {
	name   string
	peer   func(net.Conn)
	code   int
	reason string
}{
	{"another protocol", func(c net.Conn) { fmt.Fprint(c, "HTTP/1.1 400 Bad Request\r\n\r\n") }, 4, "key"},
	{"closes", func(c net.Conn) { io.CopyN(io.Discard, c, 24) }, 1, "closed"},
	{"says nothing", func(c net.Conn) { io.Copy(io.Discard, c) }, 4, "timeout"},
	{"both initiators", func(c net.Conn) { c.Write([]byte("MPA ID Req Frame\x00\x01\x00\x00")) }, 4, "both_initiators"},
	{"terminates", func(c net.Conn) {
		io.CopyN(io.Discard, c, 24)
		c.Write([]byte("MPA ID Rep Frame\x10\x02\x00\x04\x00\x10\x00\x10"))
		c.Write([]byte(
			"\x00\x16\x41\x47\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00\x00\x20\x05\x00\x00\x00\x00\x00\x00"))
	}, 5, "terminated"},
	{"closes in the middle", func(c net.Conn) { io.CopyN(io.Discard, c, 24); c.Write([]byte("MPA ID Rep Frame\x10")) },
		1, "closed"},
	{"promises more than it sends", func(c net.Conn) {
		c.Write([]byte("MPA ID Rep Frame\x10\x02\x00\x05\x00\x10\x00\x10"))
		io.Copy(io.Discard, c)
	}, 4, "timeout"},
	{"promises more than there may be", func(c net.Conn) { c.Write([]byte("MPA ID Rep Frame\x10\x02\x02\x01")) }, 4,
		"pd_length"},
	{"S and no data", func(c net.Conn) { c.Write([]byte("MPA ID Rep Frame\x10\x02\x00\x00")) }, 4, "no_enhanced_data"},
	{"promises less than it sends", func(c net.Conn) {
		io.CopyN(io.Discard, c, 24)
		c.Write([]byte("MPA ID Rep Frame\x10\x02\x00\x04\x00\x10\x00\x10\xff\xff")) // taken for an FPDU
		io.Copy(io.Discard, c)
	}, 5, "ulpdu_length"},
	{"drips", func(c net.Conn) {
		for _, b := range []byte("MPA ID Rep Frame") {
			if _, err := c.Write([]byte{b}); err != nil {
				return
			}
			time.Sleep(100 * time.Millisecond) // over a real socket: the probe's time must pass by the real clock
		}
	}, 4, "timeout"},
}

// TestProbeMPABadPeers: peers that are no iWARP, say nothing, or are not there.
func TestProbeMPABadPeers(t *testing.T) {
	for _, tt := range badMPAPeers {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			c, err := ln.Accept()
			if err != nil {
				return
			}
			tt.peer(c)
			c.Close()
		}()
		p := connecting(t, ln.Addr().String(), "--json", "--timeout", soon(tt.reason, "300ms"))
		ln.Close()
		<-done
		p.failed(t, tt.name, tt.code, tt.reason)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	p := connecting(t, ln.Addr().String(), "--json")
	p.failed(t, "nobody listens", 1, "closed")
	if !strings.Contains(p.json.Error, "refused") {
		t.Error(p.json.Error)
	}
	p = connecting(t, "192.0.2.1:7174", "--listen", "--json") // no address of ours
	p.failed(t, "cannot listen", 5, "local")
}

// soon is the time of a probe that is to run out of it, and a minute for others,
// which may have to wait for the processor.
func soon(reason, timeout string) string {
	if strings.Contains(reason, "timeout") {
		return timeout
	}
	return "1m"
}

// failed checks that a probe failed in one way and says so: code, reason, clause
// and counter. A code of 0 means none.
func (p *probed) failed(t *testing.T, what string, code int, reason string) {
	t.Helper()
	got := 0
	if p.json.Code != nil {
		got = *p.json.Code
	}
	switch {
	case p.status != 1:
		t.Errorf("%s: status is %v, want 1", what, p.status)
	case p.json.Outcome != "failed":
		t.Errorf("%s: Outcome is %v, want \"failed\"", what, p.json.Outcome)
	case got != code:
		t.Errorf("%s: got is %v, want %v", what, got, code)
	case p.json.Reason != reason:
		t.Errorf("%s: Reason is %v, want %v", what, p.json.Reason, reason)
	case p.json.Clause == "":
		t.Errorf("%s: Clause is empty", what)
	case p.json.Error == "":
		t.Errorf("%s: Error is empty", what)
	case reason != "segment" && p.json.Counters[reason] != 1:
		t.Errorf("%s: status %d\n%s", what, p.status, p.text)
	}
}

// TestProbeMPABadInitiators: what comes to a probe that listens.
func TestProbeMPABadInitiators(t *testing.T) {
	const request = "MPA ID Req Frame\x10\x02\x00\x04\xc0\x08\xc0\x04" // peer-to-peer, all kinds of RTR
	for _, tt := range []struct {
		name, first, second string // second: after the reply
		ends                bool   // TCP, then
		code                int
		reason              string
	}{
		{"another protocol", "GET / HTTP/1.1\r\n\r\n", "", false, 4, "key"},
		{"closes in the middle", request[:22], "", true, 1, "closed"},
		{"promises more than it sends", request[:22], "", false, 4, "timeout"},
		{"promises less than it sends", request + "x", "", false, 4, "early_data"},
		{"both responders", "MPA ID Rep Frame\x00\x01\x00\x00", "", false, 4, "both_responders"},
		{"revision 3", "MPA ID Req Frame\x10\x03\x00\x04", "", false, 4, "revision"},
		{"no RTR", request, "", false, 5, "rtr_timeout"},
		{"half an RTR", request, "\x00\x0e\xc1", true, 1, "closed"},
		{"data before the RTR", request,
			"\x00\x16\x41\x43\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00data\x00\x00\x00\x00", false,
			7, "not_rtr"},
		{"an FPDU longer than any", request, "\xff\xff", false, 5, "ulpdu_length"},
		{"no segment", request, "\x00\x02zz\x00\x00\x00\x00", false, 0, "segment"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			addr, end := listening(t, "--json", "--timeout", soon(tt.reason, "2s"))
			c, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_, _ = io.WriteString(c, tt.first)
			if len(tt.first) == len(request) {
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				if _, err := io.ReadFull(c, make([]byte, 24)); err != nil {
					t.Error(err)
				}
				_, _ = io.WriteString(c, tt.second)
			}
			if tt.ends {
				_ = c.(*net.TCPConn).CloseWrite()
			}
			p := end()
			p.failed(t, tt.name, tt.code, tt.reason)
		})
	}
}

func TestProbeMPAUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"host"}, {"h:1", "--ird", "16383"}, {"h:1", "--ord", "x"},
		{"h:1", "--rtr", "bogus"}, {"h:1", "--private-data", "xyz"},
		{"h:1", "--revision", "3"}, {"h:1", "--revision", "1", "--peer-to-peer"},
		{"h:1", "--rtr", "none", "--peer-to-peer"}, {"h:1", "--timeout", "0s"},
		{"h:1", "--private-data", "text:" + strings.Repeat("x", 509)},
		{":0", "--listen", "--private-data", "text:" + strings.Repeat("x", 509)}} {
		if status, _, stderr := command(t, append([]string{"probe", "mpa"}, args...)...); status != 2 ||
			!strings.Contains(stderr, "see: ipoibcmd probe mpa --help") {
			t.Errorf("%q: status %d, %q", args, status, stderr)
		}
	}
}
