package agent

import (
	"context"
	"testing"

	"ipoibcm/control"
	"ipoibcm/internal/expect"
)

// A tunedProvider counts the changes of its offloads.
type tunedProvider struct {
	*stubProvider
	set int
}

func (p *tunedProvider) SetOffload(string, bool) { p.set++ }
func (p *tunedProvider) SetTrafficClass(uint8)   {}

// A reload that the driver does not take changes nothing, not the offloads either.
func TestReloadInVainChangesNothing(t *testing.T) {
	a, stub := newAgent(t)
	p := &tunedProvider{stubProvider: stub}
	a.opt.Provider = p
	done := false
	a.opt.Reload = func() (Plan, error) {
		return Plan{Changes: []control.Change{{Key: "offload.gso", From: "true", To: "false", Effect: control.EffectNow}},
			Live: Live{Offloads: map[string]bool{"gso": false}}, Done: func() { done = true }}, nil
	}
	ctx, hangUp := context.WithCancel(t.Context())
	hangUp() // nobody waits for the answer, and nobody runs the driver
	got, err := a.reload(ctx, false)
	if err == nil {
		t.Error("the reload has no error, want that the agent did not answer")
	}
	expect.Equal(t, got.Applied, false, "Applied")
	expect.Equal(t, p.set, 0, "changes of offloads")
	expect.Equal(t, done, false, "Done was called")
}
