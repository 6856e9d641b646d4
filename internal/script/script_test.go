package script

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// An echo says what it is told.
type echo struct{}

func (echo) Do(line string) ([]string, error) {
	if line == "bad" {
		return nil, errors.New("no such thing")
	}
	return []string{"> " + line, "done"}, nil
}

func (echo) Pass(d time.Duration) []string { return []string{d.String()} }

func TestPlay(t *testing.T) {
	const in = "# what it shows\nconnect\n\told\n\n+1.5s\n"
	const want = "# what it shows\nconnect\n\t> connect\n\tdone\n\n+1.5s\n\t1.5s\n"
	got, err := Play(in, echo{})
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if again, _ := Play(got, echo{}); again != got {
		t.Errorf("played again\n%s\nwant\n%s", again, got)
	}
}

func TestMistakes(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"of the machine", "# first\nbad\n", `2: "bad": no such thing`},
		{"of the time", "+soon\n", `1: "+soon": time: invalid duration "soon"`},
	} {
		_, err := Play(tt.in, echo{})
		if err == nil || err.Error() != tt.want {
			t.Errorf("%s: got %v, want %s", tt.name, err, tt.want)
		}
	}
}

func TestDifference(t *testing.T) {
	got := difference("connect\n\ta\n\tb\n", "connect\n\ta\n\tc\n")
	if want := "line 3 after \"connect\":\n got \"\\tc\"\nwant \"\\tb\""; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := difference("a\n\tb", "a"); !strings.Contains(got, `want "\tb"`) {
		t.Errorf("got %q, want the line that is missing", got)
	}
}
