package control

// The states of a check.
const (
	CheckOK      = "ok"
	CheckWarn    = "warn"    // run works; something is not as good as it could be
	CheckFail    = "fail"    // run does not work
	CheckSkipped = "skipped" // could not be looked at, or does not apply
)

// A Doctor is the output of "doctor --json"; it needs no agent.
type Doctor struct {
	Version int     `json:"version"`
	OK      bool    `json:"ok"` // no check fails: run would work
	Checks  []Check `json:"checks"`
}

// A Check is one thing that was looked at. Names do not change.
type Check struct {
	Name   string `json:"name"`
	Status string `json:"status"`
	Detail string `json:"detail"`           // what was found, a sentence for people
	Remedy string `json:"remedy,omitempty"` // what to do about it
}
