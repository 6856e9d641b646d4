package cm

import "time"

// A Manager is the communication manager of one port: all its connections.
// It is not safe for concurrent use.
type Manager struct {
	opt Options
}

// New returns a Manager without connections or listeners.
func New(opt Options) *Manager { return &Manager{opt: opt} }

// Step applies ev at time now and appends to dst what the driver must do, in
// order. It is the only way the state changes.
func (m *Manager) Step(dst []Action, now time.Time, ev Event) []Action { return dst }

// Deadline says when the driver must send Wake; zero means never.
func (m *Manager) Deadline() time.Time { return time.Time{} }

// Conns lists the connections, those in TIMEWAIT and REJECTED included, by handle.
func (m *Manager) Conns() []ConnInfo { return nil }

// Counters calls f for every counter, in a fixed order.
func (m *Manager) Counters(f func(name string, value uint64)) {}
