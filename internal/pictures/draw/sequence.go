package draw

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
)

// A Step is one line of a sequence diagram.
type Step struct {
	Kind StepKind
	From int // the end that acts: 0 left, 1 right
	Text string
}

// A StepKind says what a step is.
type StepKind byte

const (
	// Message goes from From to the other end.
	Message StepKind = iota
	// Lost is a message that does not arrive.
	Lost
	// Note is something that happens at From.
	Note
	// State is the state of From's connections from now on.
	State
)

// A Sequence is the steps of two ends in the order of time.
type Sequence struct {
	Ends  [2]string
	Steps []Step
}

var (
	participant = regexp.MustCompile(`^participant ([ab]) as (.+)$`)
	stepLine    = regexp.MustCompile(`^(?:Note (over|left of|right of) ([ab])|([ab])(->>|-x)[ab]): (.+)$`)
)

// ReadMermaid reads one sequence diagram in Mermaid's form, as tests write them into docs/connections.md
// and docs/service.md.
func ReadMermaid(text string) (s Sequence, err error) {
	end := map[string]int{"a": 0, "b": 1}
	for i, line := range strings.Split(strings.TrimSpace(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line == "sequenceDiagram" {
			continue
		}
		if m := participant.FindStringSubmatch(line); m != nil {
			s.Ends[end[m[1]]] = m[2]
			continue
		}
		m := stepLine.FindStringSubmatch(line)
		switch {
		case m == nil:
			return s, fmt.Errorf("line %d: %q is not understood", i+1, line)
		case m[1] == "over":
			s.Steps = append(s.Steps, Step{Note, end[m[2]], m[5]})
		case m[1] != "":
			s.Steps = append(s.Steps, Step{State, end[m[2]], m[5]})
		case m[4] == "-x":
			s.Steps = append(s.Steps, Step{Lost, end[m[3]], m[5]})
		default:
			s.Steps = append(s.Steps, Step{Message, end[m[3]], m[5]})
		}
	}
	if s.Ends[0] == "" || s.Ends[1] == "" || len(s.Steps) == 0 {
		return s, fmt.Errorf("%d steps between %q and %q", len(s.Steps), s.Ends[0], s.Ends[1])
	}
	return s, nil
}

// Places of a sequence diagram.
const (
	seqWidth = 940
	seqA     = 250
	seqB     = seqWidth - seqA
	noteRoom = 225 // beside a lifeline
)

// SequenceSVG draws s under a title. Time runs down; a lifeline is thick while its end has
// a connection that is ESTABLISHED.
func SequenceSVG(title, desc string, s Sequence) string {
	p := New(seqWidth, title, desc)
	p.Text(20, 30, "title", title)
	at := [2]float64{seqA, seqB}
	steps := New(seqWidth, "", "") // drawn upon the lifelines
	top := 90.0
	y := top + 14
	from, up := [2]float64{top, top}, [2]bool{}
	life := func(i int, to float64) {
		thick, colour := 1.5, rule
		if up[i] {
			thick, colour = 4, teal
		}
		p.Line(at[i], from[i], at[i], to, thick, colour)
		from[i] = to
	}
	for _, st := range s.Steps {
		if st.Kind == State {
			life(st.From, y)
			up[st.From] = strings.Contains(st.Text, "ESTABLISHED")
		}
		y += steps.step(st, at, y)
	}
	life(0, y+6)
	life(1, y+6)
	for i, name := range s.Ends {
		p.Rect(at[i]-110, top-32, 220, 28, 5, ink, ink)
		p.Text(at[i], top-13, "bold light middle", name)
	}
	p.body.WriteString(steps.body.String())
	return p.SVG(y + 20)
}

// step draws one step at y and returns its height.
func (p *Picture) step(st Step, at [2]float64, y float64) float64 {
	switch st.Kind {
	case Note:
		return p.note(st, at[st.From], y)
	case State:
		return p.state(st, at[st.From], y)
	}
	x1, x2 := at[st.From], at[1-st.From]
	head, rest, _ := strings.Cut(st.Text, ", ") // the kind of the message, and its fields
	mid, colour := (x1+x2)/2, blue
	if strings.HasPrefix(head, "REJ") {
		colour = amber
	}
	p.Text(mid, y+14, "bold middle", head)
	y2 := y + 22
	if st.Kind == Lost {
		x2 = mid + 0.6*(x2-mid)
		p.Text(x2, y2+5, "bold middle", "×")
	}
	gap := 4 * float64(cmp.Compare(x2, x1)) // beside the lifelines
	p.Arrow(x1+gap, y2, x2-gap, y2, colour)
	if rest == "" {
		return 34
	}
	p.Text(mid, y2+15, "small faint middle", rest)
	return 48
}

// note writes the text of a Note into the margin beside the lifeline of its end, and returns its height.
func (p *Picture) note(st Step, x, y float64) float64 {
	const size, lead = 11.5, 15
	lines := Wrap(st.Text, size, noteRoom-10)
	for i, l := range lines {
		base := y + 12 + lead*float64(i)
		if st.From == 0 {
			p.Text(x-14, base, "small end", l)
		} else {
			p.Text(x+14, base, "small", l)
		}
	}
	p.Dot(x, y+8, 3, faint)
	return lead*float64(len(lines)) + 7
}

// state draws the text of a State on the lifeline of its end, and returns its height.
func (p *Picture) state(st Step, x, y float64) float64 {
	w := 1.25*TextWidth(st.Text, 11.5) + 14 // bold capitals are wide
	p.Rect(x-w/2, y+1, w, 19, 9.5, "#e6f4f1", teal)
	p.Text(x, y+14.5, "small bold middle", st.Text)
	return 26
}
