package verbs

// OneThread is why nothing is steered where there is one data thread, and one was asked for.
const OneThread = "there is one thread"

// A Threader is a provider with several data threads. It is optional: ask with a type
// assertion. One without it has one.
type Threader interface {
	// Threads is how many data threads there are.
	Threads() int
	// Thread returns the provider as data thread i has it, from 0 on. Completion queues that
	// are made from it, and the queue pairs whose receives complete there, are that
	// thread's: it runs their handlers ([CallbackCQ]), and looks after what [FDPoller] is
	// asked to. Everything else is that of the whole provider, which is its thread 0.
	Thread(i int) Provider
	// Steering says whether packets come to the thread of their queue pair at once. If they
	// do not, whichever thread has them delivers them.
	Steering() Offload
}
