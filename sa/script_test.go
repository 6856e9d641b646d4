package sa

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/internal/script"
	wire "ipoibcm/wire/sa"
)

// names are what scripts call GIDs. We are B.
var names = map[string]ib.GID{
	"B": mustGID("fe80::b"), "B'": mustGID("fec0::b"), "D": mustGID("fe80::d"), "E": mustGID("fe80::e"),
	"F":  mustGID("fe80::f"),
	"bc": mustGID("ff12:401b:ffff::ffff:ffff"), "g1": mustGID("ff12:401b:ffff::1"), "g2": mustGID("ff12:401b:ffff::2"),
	"g3": mustGID("ff12:401b:ffff::3"),
}

func mustGID(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

func nameOf(g ib.GID) string {
	for n, x := range names {
		if x == g {
			return n
		}
	}
	return g.String()
}

// TestScripts runs testdata/*.txt. Flush left goes in; -update rewrites what comes
// out.
//
// Of the administrator ("anew": groups and notices are asked for again, and paths
// are forgotten), with the script that shows each:
//
//	from    cause                               to      action                     script
//	DOWN    SetPort with a subnet manager       ASKING  Get ClassPortInfo          start
//	ASKING  no answer                           same    the same again             start
//	ASKING  answer, or refusal                  READY   anew                       start
//	ASKING  BUSY                                same    again later                busy
//	READY   no answer after the last try        ASKING  Get ClassPortInfo          away
//	READY   Reregister                          ASKING  anew                       reregister
//	READY   other SM, LID or GID                ASKING  anew                       reregister
//	any     SetPort without a subnet manager    DOWN    queries fail               down
//
// Of a group:
//
//	Join        Set, until answered             Joined                             start
//	            refused: again after a while    JoinFailed                         refused
//	            timer: Set                      nothing, or Joined if it changed   refresh
//	Join        of another state                Set, then Delete of the rest       states
//	Leave       Delete                          Left                               leave
//	trap 67     send-only: JoinFailed, Set                                         notices
//	trap 66     failed before: Set                                                 notices
func TestScripts(t *testing.T) {
	script.Run(t, "testdata/*.txt", func(t *testing.T) script.Machine {
		s := &scene{t: t, now: time.Unix(1000, 0)}
		s.restart(args{})
		return s
	})
}

// scene is a script in progress.
type scene struct {
	t   *testing.T
	c   *Client
	now time.Time
	out []string
	// asked is the last question about a name, and tids what was asked before.
	asked map[string]MAD
	tids  map[uint64]bool
	port  Port
}

type args map[string]string

func (a args) num(key string, def uint64) uint64 { return script.Hex(a, key, def) }

func (a args) dec(key string, def int) int { return script.Decimal(a, key, def) }

func (a args) duration(key string) time.Duration { return script.Duration(a, key) }

func (s *scene) restart(a args) {
	s.c = New(Options{Rand: rand.NewPCG(1, 2), Spread: -1, Refresh: a.duration("refresh"),
		MaxInFlight: a.dec("inflight", 0),
		MaxGroups:   a.dec("groups", 0), MaxPaths: a.dec("paths", 0), PathLife: a.duration("pathlife"),
		MaxTries: a.dec("tries", 2)})
	s.asked, s.tids = map[string]MAD{}, map[uint64]bool{}
	s.port = Port{Active: true, LID: 4, SMLID: 1, GID: names["B"]}
}

// Pass lets time pass, deadline by deadline.
func (s *scene) Pass(d time.Duration) []string {
	end := s.now.Add(d)
	s.out = nil
	for {
		due := s.c.Deadline()
		if due.IsZero() || due.After(end) {
			break
		}
		s.now = due
		at := len(s.out)
		s.step(Wake{})
		for i := at; i < len(s.out); i++ {
			s.out[i] = fmt.Sprintf("%-7s %s", "+"+(d-end.Sub(s.now)).Round(time.Millisecond).String(), s.out[i])
		}
	}
	s.now = end
	return s.out
}

// Do does one thing.
func (s *scene) Do(line string) ([]string, error) {
	s.out = nil
	words := strings.Fields(line)
	if words[0] == "<" {
		words = words[1:]
	}
	a, name := args{}, ""
	for _, w := range words[1:] {
		if k, v, ok := strings.Cut(w, "="); ok {
			a[k] = v
		} else if name == "" {
			name = w
		} else {
			a[w] = ""
		}
	}
	if strings.HasPrefix(line, "<") {
		return s.out, s.receive(words[0], name, a)
	}
	return s.out, s.user(words[0], name, a)
}

func (s *scene) user(word, name string, a args) error {
	states := map[string]wire.JoinState{"": wire.FullMember, "send": wire.SendOnlyNonMember,
		"sendfull": wire.SendOnlyFullMember, "none": 0}
	_, create := a["create"]
	_, forget := a["forget"]
	trap, _ := strconv.Atoi(name)
	switch word {
	case "options":
		a[name] = ""
		s.restart(a)
	case "port":
		s.port.LID, s.port.SMLID, s.port.SMSL = ib.LID(a.num("lid", 4)), ib.LID(a.num("sm", 1)), uint8(a.num("sl", 0))
		s.port.Active = name != "down"
		s.port.GID = names["B"]
		if g, ok := a["gid"]; ok {
			s.port.GID = names[g]
		}
		s.step(SetPort{s.port})
	case "join":
		j := Join{MGID: names[name], PKey: ib.PKey(a.num("pkey", 0xffff)), State: states[a["state"]], Create: create}
		if create {
			j.Params = Params{QKey: 0xb1b, MTU: ib.MTU2048, Rate: ib.Rate10G}
		}
		s.step(j)
	case "leave":
		s.step(Leave{MGID: names[name], Forget: forget})
	case "query":
		s.step(Query{PathKey{DGID: names[name], PKey: 0xffff}})
	case "subscribe":
		s.step(Subscribe{wire.Trap(trap)})
	case "unsubscribe":
		s.step(Unsubscribe{wire.Trap(trap)})
	case "finish":
		s.step(Finish{})
	case "reregister":
		s.step(Reregister{})
	case "counters":
		s.c.Counters(func(name string, v uint64) {
			if v != 0 {
				s.say("%s %d", name, v)
			}
		})
	case "status":
		i := s.c.Info()
		s.say("%v, at LID %d, %d paths, %d out, %d waiting", i.State, i.Admin.LID, i.Paths, i.InFlight, i.Waiting)
		for _, g := range s.c.Groups() {
			s.say("%s joined=%v mlid=%04x failed=%v", nameOf(g.Join.MGID), g.Joined, uint16(g.Group.MLID), g.Failed != nil)
		}
	default:
		return fmt.Errorf("no such thing")
	}
	return nil
}

// receive answers the last question about name, or reports a trap.
func (s *scene) receive(word, name string, a args) error {
	if word == "report" {
		s.report(name, a)
		return nil
	}
	q, ok := s.asked[name]
	if !ok {
		return fmt.Errorf("nothing was asked about %q", name)
	}
	var m wire.Message
	if err := m.UnmarshalBinary(q.Data[:]); err != nil {
		return err
	}
	m.Method = response(m.Method)
	m.TransactionID += a.num("tid", 0)
	switch word {
	case "ok":
		m.Record = granted(m, a)
	case "status":
		m.Status = wire.Status(a.num("code", 0))
	case "busy":
		m.Status = wire.StatusBusy
	case "redirect":
		m.Status = wire.StatusRedirect
		m.Record = wire.ClassPortInfo{Redirect: wire.Locator{LID: ib.LID(a.num("lid", 9)), QPN: 1, PKey: 0xffff}}
	case "method":
		m.Method = wire.MethodReportResp
	default:
		return fmt.Errorf("no such answer")
	}
	in := MAD{Peer: q.Peer}
	in.Peer.LID = ib.LID(a.num("from", uint64(in.Peer.LID)))
	m.AppendBinary(in.Data[:0])
	s.step(RecvMAD{&in})
	return nil
}

// granted is the record of an administrator that agrees.
func granted(m wire.Message, a args) wire.Record {
	switch r := m.Record.(type) {
	case wire.MCMemberRecord:
		if m.Method == wire.MethodDeleteResp {
			return r
		}
		r.MLID, r.MTU, r.Rate, r.QKey = ib.LID(a.num("mlid", 0xc000)), ib.MTU(a.num("mtu", 4)), ib.Rate10G, 0xb1b
		r.JoinState |= wire.JoinState(a.num("held", 0))
		if g, ok := a["mgid"]; ok {
			r.MGID = names[g]
		}
		if g, ok := a["port"]; ok {
			r.PortGID = names[g]
		}
		r.PKey = ib.PKey(a.num("pkey", uint64(r.PKey)))
		if _, ok := a["nojoin"]; ok {
			r.JoinState = 0
		}
		return r
	case wire.PathRecord:
		r.DLID, r.SLID, r.MTU, r.Rate = ib.LID(a.num("lid", 6)), 4, ib.MTU(a.num("mtu", 4)), ib.Rate10G
		if g, ok := a["to"]; ok {
			r.DGID = names[g]
		}
		return r
	case wire.ClassPortInfo:
		return wire.ClassPortInfo{ResponseTime: ib.Timeout(a.dec("response", 16)),
			CapabilityMask2: uint32(a.num("cap2", 0x1000))}
	}
	return m.Record
}

func (s *scene) report(name string, a args) {
	trap, _ := strconv.Atoi(name)
	n := wire.Notice{Generic: true, Type: 3, Producer: 4, Trap: wire.Trap(trap)}
	about := names[a["gid"]]
	copy(n.Details[6:], about[:])
	if l := a.num("lid", 0); l != 0 {
		n.Details[0], n.Details[1] = byte(l>>8), byte(l)
	}
	m := wire.Message{Header: wire.Header{Method: wire.MethodReport, TransactionID: a.num("tid", 0x77)}, Record: n}
	in := MAD{Peer: Address{LID: ib.LID(a.num("from", 1)), QPN: 1}}
	m.AppendBinary(in.Data[:0])
	s.step(RecvMAD{&in})
}

func (s *scene) say(format string, args ...any) { s.out = append(s.out, fmt.Sprintf(format, args...)) }

func (s *scene) step(ev Event) {
	for _, a := range s.c.Step(nil, s.now, ev) {
		s.show(a)
	}
	if err := s.c.check(); err != nil {
		s.t.Errorf("after %+v: %v", ev, err)
	}
}

// show says what an action is.
func (s *scene) show(a Action) {
	switch a := a.(type) {
	case SendMAD:
		s.sent(a)
	case StateChanged:
		s.say("now %v", a.State)
	case Joined:
		s.say("joined %s mlid=%04x state=%v", nameOf(a.Group.MGID), uint16(a.Group.MLID), a.Group.JoinState)
	case JoinFailed:
		text := "join failed " + nameOf(a.MGID) + why(a.Cause, a.Status)
		if a.NoGroup {
			text += ", no group"
		}
		s.say("%s", text)
	case Left:
		s.say("left %s", nameOf(a.MGID))
	case PathFound:
		s.say("path %s lid=%d", nameOf(a.Key.DGID), a.Path.DLID)
	case PathFailed:
		s.say("no path %s%s", nameOf(a.Key.DGID), why(a.Cause, a.Status))
	case Flushed:
		s.say("paths flushed")
	case PathGone:
		s.say("paths gone %s", nameOf(a.DGID))
	case Noticed:
		s.say("notice %v %s %d", a.Trap, nameOf(a.GID), a.LID)
	}
}

func why(cause Cause, status wire.Status) string {
	if cause == Refused {
		return fmt.Sprintf(": refused, %v", status)
	}
	return ": " + cause.String()
}

// sent shows a MAD of ours, and keeps questions to be answered.
func (s *scene) sent(a SendMAD) {
	var m wire.Message
	if err := m.UnmarshalBinary(a.MAD.Data[:]); err != nil {
		s.t.Fatal(err)
	}
	name, more := "info", ""
	switch r := m.Record.(type) {
	case wire.MCMemberRecord:
		name, more = nameOf(r.MGID), fmt.Sprintf(" mask=%x %v", uint64(m.Mask), r.JoinState)
		if r.PortGID != names["B"] {
			more += " port=" + nameOf(r.PortGID)
		}
	case wire.PathRecord:
		name = nameOf(r.DGID)
	case wire.InformInfo:
		name, more = strconv.Itoa(int(r.Trap)), fmt.Sprintf(" subscribe=%v", r.Subscribe)
	case wire.Notice:
		name = strconv.Itoa(int(r.Trap))
	}
	if m.Method.IsResponse() {
		s.say("> %v %v %s", m.Method, m.Attr, name)
		return
	}
	if a.MAD.Peer.LID != 1 {
		more += fmt.Sprintf(" to LID %d", a.MAD.Peer.LID)
	}
	if a.MAD.Peer.SL != 0 {
		more += fmt.Sprintf(" sl=%d", a.MAD.Peer.SL)
	}
	if s.tids[m.TransactionID] {
		more += " (again)"
	}
	s.tids[m.TransactionID] = true
	s.asked[name] = *a.MAD
	s.say("> %v %v %s%s wait %v", m.Method, m.Attr, name, more, a.Wait.Round(time.Millisecond))
}
