// Orders in memory, and what can go wrong with them: the same contract as ../python/orders.py.

const orders = {};
const seen = new Set();
const gates = {};

// Released before it is held counts too.
function gate(operation) {
  if (!gates[operation]) {
    let open;
    const opened = new Promise((done) => (open = done));
    gates[operation] = { open, opened };
  }
  return gates[operation];
}

async function create(operation, handler) {
  const how = seen.has(operation) ? undefined : handler;
  seen.add(operation);
  if (how === 'refuse') return { status: 503, body: { error: 'not now' } };
  orders[operation] = (orders[operation] ?? 0) + 1;
  if (how === 'lie') return { status: 503, body: { error: 'it was stored' } };
  if (how === 'raise') throw new Error('after the order was stored');
  if (how === 'hold') await gate(operation).opened;
  return { status: 201, body: { order: operation } };
}

function serve(server) {
  process.stdin.on('end', () => process.exit()).resume();
  server.listen(0, '127.0.0.1', () => console.log(server.address().port));
}

function release(operation) {
  gate(operation).open();
  return {};
}

module.exports = { create, count: () => orders, release, serve };
