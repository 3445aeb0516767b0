package gpu

import "time"

// StackConfig sets up Stack. Every duration has a default.
type StackConfig struct {
	InventoryTTL time.Duration     // how long an inventory is shared; default 10 s
	KeepStale    time.Duration     // how long a value that cannot be read any more is shown; default 10 min
	Health       HealthConfig      // Proof, Store, ...; Now is taken from below
	OwnerOf      OwnerOf           // nil: processes are shown, none is foreign (simulated hosts)
	RuleOf       func(string) Rule // nil: no rules
	Now          func() time.Time
}

// Stack puts the decorators around a source in the order that works: the cache next to the driver, health above it, so that
// a fault or a rule shows at once and not after the cache's time.
func Stack(src Source, cfg StackConfig) (*Watched, Source, error) {
	if cfg.InventoryTTL <= 0 {
		cfg.InventoryTTL = 10 * time.Second
	}
	if cfg.KeepStale <= 0 {
		cfg.KeepStale = 10 * time.Minute
	}
	cfg.Health.Now = cfg.Now
	src = Remember(Cached(src, cfg.InventoryTTL, cfg.Now), cfg.KeepStale, cfg.Now)
	if cfg.OwnerOf != nil {
		src = Owned(src, cfg.OwnerOf)
	}
	health, err := Watch(src, cfg.Health)
	if err != nil {
		return nil, nil, err
	}
	src = health
	if cfg.RuleOf != nil {
		src = Ruled(src, cfg.RuleOf)
	}
	return health, src, nil
}
