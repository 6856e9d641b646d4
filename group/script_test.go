package group

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/script"
	"ipoibcm/wire/ip"
)

// What a machine does, in the words of the scripts. The IP address of a group is
// lost on the wire, so that scripts show the MGID.
//
//	from    event                          to / action
//	down    up                             up; join all, broadcast first
//	up      up again                       join all anew, leave nothing
//	up      down                           leave all, broadcast last
//	any     addr, report, kernel list      join with the first reason of an MGID,
//	                                       leave with the last
//	any     new peers, other family        join the new groups, then leave the old
//	up      join failed                    wait 1 s, doubled up to 60 s, join again
func TestScripts(t *testing.T) {
	script.Run(t, "testdata/*.txt", func(t *testing.T) script.Machine { return &scripted{t: t, now: start} })
}

// scripted is a machine behind a script. Lines "options" come before all others.
type scripted struct {
	t   *testing.T
	o   Options
	m   *Machine
	now time.Time
}

// Pass lets time pass.
func (s *scripted) Pass(d time.Duration) []string {
	s.now = s.now.Add(d)
	return s.step(Wake{})
}

// Do shows something, or gives the machine an event.
func (s *scripted) Do(line string) (out []string, err error) {
	w := strings.Fields(line)
	if w[0] == "options" {
		return nil, s.options(w[1:])
	}
	m := s.machine()
	switch w[0] {
	case "groups":
		for _, g := range m.Groups() {
			out = append(out, fmt.Sprintf("%s %s %s refs=%d since=+%s joined=%v", g.IP, g.MGID, g.Reasons, g.Refs,
				g.Since.Sub(start), g.Joined))
		}
	case "counters":
		m.Counters(func(name string, v uint64) {
			if v != 0 {
				out = append(out, fmt.Sprintf("%s %d", name, v))
			}
		})
	case "send":
		g, ok := m.Table().MGIDFor(addr(w[1]))
		peers, copies := m.Table().Replicate()
		if !copies {
			peers = nil
		}
		out = append(out, fmt.Sprintf("%s %v copies=%v", g, ok, peers))
	case "wanted":
		out = append(out, fmt.Sprint(m.Table().Wanted(addr(w[1]))))
	case "deadline":
		if d := m.Deadline(); !d.IsZero() {
			out = append(out, fmt.Sprintf("in %s", d.Sub(s.now)))
		}
	default:
		ev, err := event(w)
		if err != nil {
			return nil, err
		}
		return s.step(ev), nil
	}
	return out, nil
}

func (s *scripted) machine() *Machine {
	if s.m == nil {
		s.m = New(s.o)
	}
	return s.m
}

func (s *scripted) options(words []string) error {
	for _, word := range words {
		k, v, _ := strings.Cut(word, "=")
		switch k {
		case "max":
			fmt.Sscan(v, &s.o.MaxGroups)
		case "pkey":
			fmt.Sscanf(v, "%v", &s.o.PKey)
		case "underlay4":
			s.o.Underlay4 = addr(v)
		case "peer":
			s.o.Peers = append(s.o.Peers, gid(v))
		default:
			return fmt.Errorf("there is no option %s", k)
		}
	}
	return nil
}

// step gives the machine an event and prints what it wants done.
func (s *scripted) step(ev Event) (out []string) {
	for _, a := range s.machine().Step(nil, s.now, ev) {
		switch a := a.(type) {
		case Join:
			out = append(out, "join "+a.MGID.String())
		case Leave:
			out = append(out, "leave "+a.MGID.String())
		case Publish:
			if a.Table != s.m.Table() {
				s.t.Errorf("%T: another table", ev)
			}
			out = append(out, "publish")
		}
	}
	return out
}

// event reads one.
func event(w []string) (Event, error) {
	switch w[0] {
	case "up":
		return Up{gid(w[1])}, nil
	case "down":
		return Down{}, nil
	case "addr+":
		ev := AddAddr{Prefix: netip.MustParsePrefix(w[1])}
		if len(w) > 2 {
			ev.Broadcast = addr(w[2])
		}
		return ev, nil
	case "addr-":
		return DelAddr{netip.MustParsePrefix(w[1])}, nil
	case "kernel":
		var ev Kernel
		for _, s := range w[1:] {
			ev.Groups = append(ev.Groups, addr(s))
		}
		return ev, nil
	case "peers":
		var ev SetPeers
		for _, s := range w[1:] {
			if s == "nobody" { // a list that is empty
				ev.Copies = true
				continue
			}
			ev.Peers = append(ev.Peers, gid(s))
		}
		return ev, nil
	case "failed":
		return JoinFailed{gid(w[1]), errors.New("no such device")}, nil
	}
	for k := ip.Join; k <= ip.Block; k++ {
		if k.String() == w[0] {
			c := ip.Change{Group: addr(w[1]), Kind: k}
			if len(w) > 2 {
				fmt.Sscan(w[2], &c.Sources)
			}
			return Report{[]ip.Change{c}}, nil
		}
	}
	return nil, errors.New("what is that?")
}
