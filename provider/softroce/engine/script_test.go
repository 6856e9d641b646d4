package engine

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

var update = flag.Bool("update", false, "rewrite the indented lines of the packet scripts")

// TestScripts runs the packet scripts. Flush left goes in, indented is all that
// comes out.
//
//	qp rc mtu=256 psn=0      the QP under test, in RTS; state=RTR stops there;
//	                         also retry= rnr= rnrwait= timeout= rd= window= within= srq
//	urge                     an ACK must not wait
//	recv ID LEN              post a receive
//	send ID LEN              post a SEND; imm= inv= unsignaled fence
//	write|read ID LEN        post a WRITE (imm=) or READ of va=0 rkey=7
//	mem KEY LEN [r] [w]      register memory at va=0
//	modify ERR               move to a state
//	+DURATION                let time go by
//	< OPCODE psn=            a packet arrives; A again gap= len= syndrome= msn= imm= inv=
//	                         va= rkey= dma= pkey= foreign
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatal("no scripts", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			in, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			s := &script{t: t, now: start}
			for i, line := range strings.Split(strings.TrimSuffix(string(in), "\n"), "\n") {
				if strings.HasPrefix(line, "\t") {
					continue
				}
				fmt.Fprintln(&out, line)
				if line == "" || line[0] == '#' {
					continue
				}
				s.line = i + 1
				for _, l := range s.do(strings.Fields(line)) {
					fmt.Fprintln(&out, "\t"+l)
				}
			}
			if *update {
				if err := os.WriteFile(file, []byte(out.String()), 0o666); err != nil {
					t.Fatal(err)
				}
				return
			}
			if out.String() != string(in) {
				got, want := strings.Split(out.String(), "\n"), strings.Split(string(in), "\n")
				for i := range got {
					if i >= len(want) || got[i] != want[i] {
						t.Fatalf("line %d\n got %q\nwant %q\nall of it:\n%s", i+1, got[i], want[min(i, len(want)-1)], out.String())
					}
				}
				t.Fatal("the script goes on after what came out")
			}
		})
	}
}

// script is one QP and what it has told.
type script struct {
	t    *testing.T
	line int
	now  time.Time
	tr   ib.Transport
	q    *QP
	mem  memory
	log  []string
	pkts [4]Packet
}

func (s *script) SendDone(wc verbs.WC) {
	s.log = append(s.log, fmt.Sprintf("sent id=%d %v", wc.ID, wc.Status))
}

func (s *script) RecvDone(wc verbs.WC) {
	l := fmt.Sprintf("received id=%d %v", wc.ID, wc.Status)
	if wc.Status == verbs.Success {
		l += fmt.Sprintf(" %v len=%d", wc.Opcode, wc.ByteLen)
	}
	if wc.Flags&verbs.WithImm != 0 {
		l += fmt.Sprintf(" imm=%d", wc.Imm)
	}
	if wc.Flags&verbs.WithInv != 0 {
		l += fmt.Sprintf(" inv=%d", wc.Imm)
	}
	s.log = append(s.log, l)
}

func (s *script) Event(ev verbs.Event) {
	l := "event " + ev.Kind.String()
	if ev.Status != 0 {
		l += " " + ev.Status.String()
	}
	s.log = append(s.log, l)
}

// args splits words into key=value and flags.
func (s *script) args(words []string) map[string]string {
	m := map[string]string{}
	for _, w := range words {
		k, v, _ := strings.Cut(w, "=")
		m[k] = v
	}
	return m
}

func (s *script) num(m map[string]string, key string, base int, def uint64) uint64 {
	v, ok := m[key]
	if !ok {
		return def
	}
	n, err := strconv.ParseUint(v, base, 64)
	if err != nil {
		s.t.Fatalf("line %d: %v", s.line, err)
	}
	return n
}

func (s *script) do(words []string) []string {
	s.log = nil
	m := s.args(words)
	id := func() (uint64, int) {
		return s.num(map[string]string{"": words[1]}, "", 10, 0), int(s.num(map[string]string{"": words[2]}, "", 10, 0))
	}
	switch {
	case words[0] == "qp":
		s.newQP(words[1], m)
	case words[0] == "urge":
		s.q.UrgeAck()
	case words[0] == "mem":
		key, n := id()
		r := &mem{buf: fill(n, 0)}
		if _, ok := m["r"]; ok {
			r.access |= verbs.RemoteRead
		}
		if _, ok := m["w"]; ok {
			r.access |= verbs.RemoteWrite
		}
		s.mem[uint32(key)] = r
	case words[0] == "recv":
		k, n := id()
		if _, err := s.q.PostRecv([]verbs.RecvWR{{ID: k, SG: sg(make([]byte, n))}}); err != nil {
			s.log = append(s.log, err.Error())
		}
	case words[0] == "send", words[0] == "write", words[0] == "read":
		s.post(words[0], m, id)
	case words[0] == "modify":
		for st := verbs.StateReset; st <= verbs.StateError; st++ {
			if st.String() == words[1] {
				if err := s.q.Modify(&verbs.QPAttr{State: st}, s.now); err != nil {
					s.log = append(s.log, err.Error())
				}
			}
		}
	case words[0][0] == '+':
		d, err := time.ParseDuration(words[0][1:])
		if err != nil {
			s.t.Fatalf("line %d: %v", s.line, err)
		}
		s.now = s.now.Add(d)
		s.q.Wake(s.now)
	case words[0] == "<":
		s.packet(words[1], m)
	default:
		s.t.Fatalf("line %d: %q?", s.line, words[0])
	}
	for n := s.q.Output(s.pkts[:], s.now); n > 0; n = s.q.Output(s.pkts[:], s.now) {
		for i := range s.pkts[:n] {
			b := append(s.pkts[i].Append(nil), 0, 0, 0, 0)
			s.log = append(s.log, "> "+opName(b)[3:])
		}
	}
	return s.log
}

func (s *script) newQP(tr string, m map[string]string) {
	s.tr, s.mem = ib.RC, memory{}
	if tr == "uc" {
		s.tr = ib.UC
	}
	cfg := Config{QPN: 0xa1, Transport: s.tr, SendDepth: 16, RecvDepth: 16, Memory: s.mem, Sink: s, Window: int(s.num(m, "window", 10, 0)), AckWithin: int(s.num(m, "within", 10, 0))}
	if _, ok := m["srq"]; ok {
		cfg.Shared = NewRecvRing(4, 1)
	}
	s.q = New(cfg)
	psn, rd := ib.PSN(s.num(m, "psn", 16, 0)), uint8(s.num(m, "rd", 10, 2))
	attr := verbs.QPAttr{PKey: ib.DefaultPKey, Access: verbs.RemoteRead | verbs.RemoteWrite, Path: verbs.AHAttr{SGID: gidA, DGID: gidB},
		PathMTU: ib.MTUFromOctets(int(s.num(m, "mtu", 10, 256))), DestQPN: 0xa2, RQPSN: psn, SQPSN: psn, MaxDestRDAtomic: rd, MaxRDAtomic: rd,
		MinRNRTimer: 12, Timeout: ib.Timeout(s.num(m, "timeout", 10, 7)), RetryCount: uint8(s.num(m, "retry", 10, 7)), RNRRetry: uint8(s.num(m, "rnr", 10, 7)),
		MaxRNRWait: time.Duration(s.num(m, "rnrwait", 10, 0)) * time.Millisecond}
	last := verbs.StateRTS
	if m["state"] == "RTR" {
		last = verbs.StateRTR
	}
	for attr.State = verbs.StateInit; attr.State <= last; attr.State++ {
		if err := s.q.Modify(&attr, s.now); err != nil {
			s.t.Fatalf("line %d: %v", s.line, err)
		}
	}
}

func (s *script) post(op string, m map[string]string, id func() (uint64, int)) {
	k, n := id()
	wr := verbs.SendWR{ID: k, Flags: verbs.Signaled, SG: sg(fill(n, 0)), Imm: uint32(s.num(m, "imm", 10, 0)), InvKey: uint32(s.num(m, "inv", 10, 0)), RKey: 7}
	_, imm := m["imm"]
	_, inv := m["inv"]
	switch {
	case op == "read":
		wr.Opcode = verbs.Read
	case op == "write" && imm:
		wr.Opcode = verbs.WriteImm
	case op == "write":
		wr.Opcode = verbs.Write
	case imm:
		wr.Opcode = verbs.SendImm
	case inv:
		wr.Opcode = verbs.SendInv
	}
	if _, ok := m["unsignaled"]; ok {
		wr.Flags = 0
	}
	if _, ok := m["fence"]; ok {
		wr.Flags |= verbs.Fence
	}
	if _, err := s.q.PostSend([]verbs.SendWR{wr}, s.now); err != nil {
		s.log = append(s.log, err.Error())
	}
}

// packet makes a packet and gives it to the QP.
func (s *script) packet(name string, m map[string]string) {
	op := roce.Opcode(0xff)
	for o := range 256 {
		if roce.Opcode(o).String() == s.tr.String()+" "+name {
			op = roce.Opcode(o)
		}
	}
	if !op.Valid() {
		s.t.Fatalf("line %d: no opcode %s", s.line, name)
	}
	_, a := m["A"]
	n := int(s.num(m, "len", 10, 0))
	b := make([]byte, roce.BTHLen, 400)
	roce.PutBTH(b, roce.BTHFields{Opcode: op, Pad: roce.Pad(n), PKey: ib.PKey(s.num(m, "pkey", 16, 0xffff)), DestQPN: 0xa1, AckReq: a, PSN: ib.PSN(s.num(m, "psn", 16, 0))})
	if _, again := m["again"]; again {
		roce.BTH(b).SetReserved(sentAgain)
	} else {
		roce.BTH(b).SetReserved(uint8(s.num(m, "gap", 10, 0)))
	}
	ext := make([]byte, op.HeaderLen()-roce.BTHLen)
	switch {
	case op.HasRETH():
		roce.PutRETH(ext, s.num(m, "va", 0, 0), uint32(s.num(m, "rkey", 10, 7)), uint32(s.num(m, "dma", 10, uint64(n))))
	case op.HasAETH():
		roce.PutAETH(ext, roce.Syndrome(s.num(m, "syndrome", 16, 0x1f)), uint32(s.num(m, "msn", 10, 0)))
	}
	if op.HasImm() || op.HasInv() {
		roce.PutImmDt(ext[len(ext)-4:], uint32(s.num(m, "imm", 10, s.num(m, "inv", 10, 0))))
	}
	b = append(append(b, ext...), fill(n, int(s.num(m, "fill", 10, 0)))...)
	b = append(b, make([]byte, roce.Pad(n)+roce.ICRCLen)...)
	var pkt roce.Packet
	if err := pkt.Parse(b); err != nil {
		s.t.Fatalf("line %d: %v", s.line, err)
	}
	src := Source{Src: gidB, Dst: gidA}
	if _, ok := m["foreign"]; ok {
		src.Src[0] = 0xfe
	}
	if r := s.q.Receive(&pkt, &src, s.now); r != NoDrop {
		s.log = append(s.log, "drop "+r.String())
	}
}
