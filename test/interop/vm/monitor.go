package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// monitorTimeout bounds the time that QEMU takes to answer.
const monitorTimeout = 10 * time.Second

// Stop stops the guest's processors, as in a host that is suspended. The guest's clocks
// stop too, but for the one of the board.
func (v *VM) Stop() error { return v.monitor("stop") }

// Continue ends Stop.
func (v *VM) Continue() error { return v.monitor("cont") }

// WakeUp presses the guest's power button. That ends a suspend that the guest began
// itself, if it has the module button.
func (v *VM) WakeUp() error { return v.monitor("system_powerdown") }

// monitor makes QEMU execute a command of its monitor.
func (v *VM) monitor(command string) error {
	v.out.Lock()
	defer v.out.Unlock()
	if v.mon == nil {
		return errors.New("no monitor")
	}
	if err := v.mon.SetDeadline(time.Now().Add(monitorTimeout)); err != nil {
		return err
	}
	if v.answers == nil {
		v.answers = json.NewDecoder(v.mon)
		if err := v.execute("qmp_capabilities"); err != nil {
			return err
		}
	}
	return v.execute(command)
}

// execute sends one command and waits for its answer. It skips events.
func (v *VM) execute(command string) error {
	if _, err := fmt.Fprintf(v.mon, "{\"execute\": %q}\n", command); err != nil {
		return fmt.Errorf("monitor of %s: %s: %w", v.Name, command, err)
	}
	for {
		var m struct {
			Return *json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := v.answers.Decode(&m); err != nil {
			return fmt.Errorf("monitor of %s: %s: %w", v.Name, command, err)
		}
		switch {
		case m.Error != nil:
			return fmt.Errorf("monitor of %s: %s: %s", v.Name, command, m.Error.Desc)
		case m.Return != nil:
			return nil
		}
	}
}
