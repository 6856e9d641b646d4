package explore

import (
	"regexp"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/simsm"
)

// subnets are what is explored of them. In the short form the budgets are smaller. Only with -explore.large are
// they so large that one search takes minutes.
func subnets() []subnetSetup {
	choose := func(big bool, few, many int) int {
		if big {
			return many
		}
		return few
	}
	more := func(few, many int) int { return choose(larger(), few, many) }
	most := func(few, many int) int { return choose(*large, few, many) }
	all := []subnetSetup{
		{name: "two hosts start", fromStart: true, losses: more(1, 2), delays: more(0, 1)},
		{name: "the manager goes away", stops: 1, starts: 1, losses: 1, delays: more(0, 1)},
		{name: "the manager starts anew", starts: most(1, 2), losses: 1, delays: more(0, 1)},
		{name: "answers are slow", starts: 1, delays: more(1, 3)},
		{name: "the manager forgets without a word", quiet: 1, losses: 1, sends: 1, delays: more(0, 1)},
		{name: "the last leave deletes", member: true, leaves: 1, joins: 1, sends: 1, losses: more(0, 1)},
		{name: "the last leave deletes, of old", opt: simsm.Options{NoSendOnlyFull: true}, member: true, leaves: 1,
			joins: 1, sends: 1, losses: more(0, 1)},
		{name: "a leave while the manager starts anew", member: true, leaves: 1, joins: more(0, 1), starts: 1,
			losses: more(0, 1)},
		{name: "the P_Key moves", moves: 1, starts: more(0, 1), losses: 1, delays: most(0, 1)},
		{name: "another LID", relabels: 1, losses: 1, sends: more(0, 1)},
		{name: "a link goes down and up", flaps: more(1, 2), losses: 1},
		{name: "a link goes down and up in a group", member: true, flaps: 1, sends: more(0, 1), losses: more(0, 1)},
	}
	for i := range all {
		all[i].timers = more(3, 6)
	}
	return all
}

const (
	// maxSubnetStates bounds one search. None of those above comes near it.
	maxSubnetStates = 500_000
	// wantedSubnet is how many states there must be in all.
	wantedSubnet, wantedSubnetShort = 10_000, 2_000
)

// TestSubnets lets a subnet manager go away, start anew, answer late or not at all, LIDs and
// P_Keys change, links fail and groups be joined, left and sent to, in every order that a
// fabric allows. From
// every state two hosts get what they want once nothing goes wrong any more, and meanwhile
// none sends where it has no path, or is up without being a member of the broadcast group.
func TestSubnets(t *testing.T) {
	most, least := maxSubnetStates, wantedSubnetShort
	if larger() {
		least = wantedSubnet
	}
	if raceDetector {
		most = 300
	}
	total := 0
	for _, s := range subnets() {
		if ok, err := regexp.MatchString(*only, s.name); err != nil || !ok {
			continue
		}
		start := time.Now()
		r := s.search(most)
		if r.failure != "" {
			t.Fatal(r.failure)
		}
		total += r.states
		t.Logf("%-40s %6d states, %7d transitions, %d steps deep; took %v", s.name, r.states, r.transitions, r.depth,
			time.Since(start).Round(time.Millisecond))
		if !r.complete && !raceDetector {
			t.Errorf("%s: given up at %d states", s.name, most)
		}
	}
	if *only != "" || raceDetector {
		return // these are not all
	}
	if total < least {
		t.Errorf("%d states, want %d at least", total, least)
	}
}

// What is broken on purpose is noticed.
func TestSubnetsBroken(t *testing.T) {
	for _, tt := range []struct {
		subnetSetup
		says string
	}{
		{subnetSetup{name: "leaves are never sent", member: true, leaves: 1, noLeave: true}, "still a member of a group"},
		{subnetSetup{name: "nobody hears the manager's word", starts: 1, noHear: true}, "is no member"},
	} {
		r := tt.search(10_000)
		first, _, _ := strings.Cut(r.failure, "\n")
		if !strings.Contains(first, tt.says) {
			t.Errorf("%s: noticed %q in %d states, want %q", tt.name, first, r.states, tt.says)
		}
	}
}
