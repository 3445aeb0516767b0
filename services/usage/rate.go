package usage

import (
	"cmp"
	"math"
	"math/bits"
	"slices"

	"github.com/carrel-dev/carrel/services/fleet"
)

// AnyModel is the model of rates for models without a rate of their own.
const AnyModel = "*"

// Rates joins moments with prices.
type Rates struct {
	rows    map[string][]period
	merged  map[string][]period
	current string
}

// period is a price from a moment on.
type period struct {
	from   int64
	micros int64 // per device-hour; negative: no rate of its own from here on
}

// NewRates takes rows in any order.
func NewRates(list []fleet.Rate) *Rates {
	r := &Rates{rows: map[string][]period{}, merged: map[string][]period{}}
	for _, rate := range list {
		r.rows[rate.Model] = append(r.rows[rate.Model], period{from: rate.From.UnixMilli(), micros: rate.MicrosPerHour})
		if rate.Currency != "" {
			r.current = rate.Currency
		}
	}
	for _, periods := range r.rows {
		slices.SortStableFunc(periods, func(a, b period) int { return cmp.Compare(a.from, b.from) })
	}
	return r
}

// Currency is the deployment's one currency; empty without rates.
func (r *Rates) Currency() string { return r.current }

// of returns a model's prices: its own from its first row on, before that those for any model.
func (r *Rates) of(model string) []period {
	if p, ok := r.merged[model]; ok {
		return p
	}
	own, any := r.rows[model], r.rows[AnyModel]
	merged := own
	if len(own) == 0 {
		merged = any
	} else if len(any) > 0 {
		merged = nil
		for _, p := range any {
			if p.from < own[0].from {
				merged = append(merged, p)
			}
		}
		merged = append(merged, own...)
	}
	r.merged[model] = merged
	return merged
}

// Cost is the price of [from, to) of a segment in millionths. Each stretch of one segment at one rate is rounded down as a whole, from
// its own beginning: to a position x in it belongs floor(rate * x / hour). So parts of a window add up to the window exactly, and
// all groupings have the same sum; against the exact price less than one millionth per stretch is lost.
func (r *Rates) Cost(s Segment, from, to int64) int64 {
	var cost int64
	periods := r.of(s.Key.Model)
	for i, p := range periods {
		begin, end := max(p.from, s.From), s.To
		if i+1 < len(periods) {
			end = min(end, periods[i+1].from)
		}
		if begin >= end {
			continue
		}
		x, y := clamp(from, begin, end)-begin, clamp(to, begin, end)-begin
		cost = addCapped(cost, price(p.micros, y)-price(p.micros, x))
	}
	return cost
}

// price is floor(micros * ms / hour) with 128 bits between, capped at the largest number.
func price(micros, ms int64) int64 {
	if micros <= 0 || ms <= 0 {
		return 0
	}
	high, low := bits.Mul64(uint64(micros), uint64(ms))
	if high >= HourMs {
		return math.MaxInt64
	}
	quotient, _ := bits.Div64(high, low, HourMs)
	return int64(min(quotient, math.MaxInt64))
}

func addCapped(a, b int64) int64 {
	if sum := a + b; sum >= a {
		return sum
	}
	return math.MaxInt64
}
