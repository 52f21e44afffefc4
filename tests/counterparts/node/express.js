// express-idempotency, as its README says to mount it. Prints its port.
const http = require('node:http');
const express = require('express');
const { idempotency, getSharedIdempotencyService } = require('express-idempotency');
const orders = require('./orders');

const app = express();
app.get('/orders', (_, answer) => answer.json(orders.count()));
app.get('/release/:operation', ({ params }, answer) => answer.json(orders.release(params.operation)));
app.post('/orders', express.json(), idempotency(), (request, answer, next) => {
  if (getSharedIdempotencyService().isHit(request)) return;
  orders
    .create(request.body.operation, request.headers.handler)
    .then(({ status, body }) => answer.status(status).json(body))
    .catch(next);
});
orders.serve(http.createServer(app));
