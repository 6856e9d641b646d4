package softroce

import (
	"fmt"
	"time"

	"ipoibcm/verbs"
)

var _ verbs.Prober = (*Device)(nil)

// aliveEvery is the time between two looks of Alive at a receiver.
const aliveEvery = 5 * time.Millisecond

// Alive implements [verbs.Prober]. It wakes each receiver, and fails if one has not begun
// another turn in time.
func (d *Device) Alive(within time.Duration) error {
	began := make([]uint64, len(d.receivers))
	for i, r := range d.receivers {
		began[i] = r.turns.Load()
		r.wake()
	}
	end := time.Now().Add(within)
	for i, r := range d.receivers {
		for r.turns.Load() == began[i] {
			if d.closing.Load() {
				return nil
			}
			if time.Now().After(end) {
				return fmt.Errorf("the thread that receives packets has not moved for %v", within)
			}
			time.Sleep(aliveEvery)
		}
	}
	return nil
}
